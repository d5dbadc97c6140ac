"""Laws of specification files, over specifications drawn from the declared types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from msgspec import inspect

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import RunSpec
from areno_fn.engine import specfile
from areno_fn.engine.specfile.formats import encode

SUFFIXES = (".toml", ".yaml", ".json", ".msgpack")
QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

TEXTS = st.text(max_size=12) | st.sampled_from(
    ["1e-6", "no", "null", "2024-01-01", "1:30", "~", "=", "\u0085 \u2028\ufeff", "a.b", " x "]
)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.booleans() | INTEGERS | FLOATS | TEXTS
FREE = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)


def values(info: inspect.Type) -> st.SearchStrategy[Any]:
    """Plain data that this type accepts, independent of msgspec's own checking."""
    match info:
        case inspect.StructType():
            return tables(info)
        case inspect.UnionType():
            return st.one_of([values(member) for member in info.types])
        case inspect.ListType():
            return st.lists(values(info.item_type), min_size=info.min_length or 0, max_size=2)
        case inspect.TupleType():
            return st.tuples(*[values(item) for item in info.item_types]).map(list)
        case inspect.DictType():
            return st.dictionaries(TEXTS, values(info.value_type), max_size=4)
        case inspect.AnyType():
            return FREE
        case inspect.LiteralType():
            return st.sampled_from(info.values)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.StrType() if info.min_length:
            return TEXTS.filter(bool)
        case inspect.StrType():
            return (
                TEXTS if info.pattern is None else st.from_regex(info.pattern.removesuffix("$") + r"\Z", fullmatch=True)
            )
        case inspect.IntType():
            return st.integers(-(2**63) if info.ge is None else info.ge, 2**63 - 1 if info.le is None else info.le)
        case inspect.FloatType():
            low, high = (info.ge if info.gt is None else info.gt), (info.le if info.lt is None else info.lt)
            return st.floats(
                low,
                high,
                exclude_min=info.gt is not None,
                exclude_max=info.lt is not None,
                allow_nan=False,
                allow_infinity=False,
            )
    raise AssertionError(f"no strategy for {info}")


def tables(info: inspect.StructType) -> st.SearchStrategy[dict[str, Any]]:
    required = {field.name: values(field.type) for field in info.fields if field.required}
    optional = {field.name: values(field.type) for field in info.fields if not field.required}
    if info.tag is not None:
        required["kind"] = st.just(info.tag)
    return st.fixed_dictionaries(required, optional=optional)


def exactly(spec: RunSpec) -> str:
    return json.dumps(msgspec.to_builtins(spec), sort_keys=True)


PLAIN = values(inspect.type_info(RunSpec))
SPECS = PLAIN.map(lambda plain: msgspec.convert(plain, RunSpec))


@QUICK
@given(spec=SPECS, suffix=st.sampled_from(SUFFIXES))
def test_reading_what_was_written_gives_the_same_specification(tmp_path: Path, spec: RunSpec, suffix: str) -> None:
    path = tmp_path / f"spec{suffix}"
    specfile.write(spec, path)
    again = specfile.read(path)
    assert again == spec
    assert exactly(again) == exactly(spec)  # 1, 1.0 and True are equal and still not the same


@QUICK
@given(spec=SPECS, way=st.permutations(SUFFIXES))
def test_packing_is_undone_by_unpacking_through_every_format(tmp_path: Path, spec: RunSpec, way: list[str]) -> None:
    first, last = tmp_path / "first.msgpack", tmp_path / "last.msgpack"
    specfile.write(spec, first)
    source = first
    for suffix in way:
        target = tmp_path / f"step{suffix}"
        specfile.write(specfile.read(source), target)
        source = target
    specfile.write(specfile.read(source), last)
    assert last.read_bytes() == first.read_bytes()


@QUICK
@given(spec=SPECS)
def test_check_accepts_and_keeps_every_valid_specification(spec: RunSpec) -> None:
    assert specfile.check(spec) == spec


@QUICK
@given(plain=PLAIN)
def test_other_parsers_read_the_files_alike(tmp_path: Path, plain: dict[str, Any]) -> None:
    """What a stranger's JSON and YAML writers produce is the same specification."""
    paths = {".json": json.dumps(plain), ".yaml": yaml.safe_dump(plain)}
    for suffix, text in paths.items():
        (tmp_path / f"s{suffix}").write_text(text, encoding="utf-8")
        assert specfile.read(tmp_path / f"s{suffix}") == msgspec.convert(plain, RunSpec)


@QUICK
@given(data=st.binary(max_size=60), suffix=st.sampled_from(SUFFIXES))
def test_any_bytes_are_read_or_refused_in_one_sentence(tmp_path: Path, data: bytes, suffix: str) -> None:
    path = tmp_path / f"noise{suffix}"
    path.write_bytes(data)
    with pytest.raises(SpecError) as caught:
        specfile.read(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@QUICK
@given(
    text=st.text(alphabet="[]{}!&*<:-,?|>%@`'\"#= \n\t0123456789xobeE._~aé\\", max_size=40),
    suffix=st.sampled_from(SUFFIXES[:3]),
)
def test_any_text_is_read_or_refused_in_one_sentence(tmp_path: Path, text: str, suffix: str) -> None:
    path = tmp_path / f"noise{suffix}"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        specfile.read(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@QUICK
@given(plain=PLAIN, data=st.data())
def test_one_spoiled_value_is_named_by_its_place(tmp_path: Path, plain: dict[str, Any], data: st.DataObject) -> None:
    """A value of a type that no field takes is refused, and the sentence names the field."""
    phase = data.draw(st.integers(0, len(plain["phases"]) - 1))
    name = data.draw(st.sampled_from(["name", "algorithm", "steps", "batch", "rewards"]))
    plain["phases"][phase][name] = [3, [True]]
    (tmp_path / "spec.json").write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(SpecError, match=rf"phases\.[A-Za-z0-9_.-]+\.{name}.* must be .*, received "):
        specfile.read(tmp_path / "spec.json")


@QUICK
@given(spec=SPECS, seed=st.integers(0, 2**63 - 1), out=st.text(max_size=10), rows=st.integers(1, 2**20))
def test_an_override_sets_its_field_and_no_other(tmp_path: Path, spec: RunSpec, seed: int, out: str, rows: int) -> None:
    assume(all(phase.name != "0" for phase in spec.phases[1:]))  # a name goes before an index
    path = tmp_path / "spec.msgpack"
    specfile.write(spec, path)
    if out.startswith('"'):
        out = json.dumps(out)
    changed = specfile.read(path, [f"seed={seed}", f"out={out}", f"phases.0.batch.rows={rows}"])
    words = json.loads(out) if out.startswith('"') else out
    assert (changed.seed, changed.out, changed.phases[0].batch.rows) == (seed, words, rows)
    phase = msgspec.structs.replace(
        changed.phases[0], batch=msgspec.structs.replace(changed.phases[0].batch, rows=spec.phases[0].batch.rows)
    )
    phases = [phase, *changed.phases[1:]]
    assert msgspec.structs.replace(changed, seed=spec.seed, out=spec.out, phases=phases) == spec


@QUICK
@given(spec=SPECS, suffix=st.sampled_from(SUFFIXES))
def test_what_version_1_could_say_is_read_as_what_it_said(tmp_path: Path, spec: RunSpec, suffix: str) -> None:
    """A specification without what is newer, written as version 1 was: without the kinds that went without saying."""
    plain = msgspec.to_builtins(spec)
    judged = [*plain["phases"], *([plain["evaluation"]] if plain["evaluation"] else [])]
    for table in judged:
        table["rewards"] = [reward for reward in table["rewards"] if reward["kind"] == "function"]
    wanted = msgspec.convert(plain, RunSpec)
    for table in judged:
        for reward in table["rewards"]:
            del reward["kind"]
    for phase in plain["phases"]:
        for optimizer in phase["optimizers"]:
            if optimizer["kind"] == "adamw":
                del optimizer["kind"]
    plain["version"] = 1
    path = tmp_path / f"old{suffix}"
    path.write_bytes(encode(without_nothing(plain) if suffix == ".toml" else plain, suffix))
    assert exactly(specfile.read(path)) == exactly(wanted)


def without_nothing(value: Any) -> Any:
    """Plain data as TOML has it: what is nothing is not there."""
    if isinstance(value, dict):
        return {key: without_nothing(item) for key, item in value.items() if item is not None}
    return [without_nothing(item) for item in value] if isinstance(value, list) else value
