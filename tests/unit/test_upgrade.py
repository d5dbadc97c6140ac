"""Specifications of older versions: what each once said is what the run does now."""

from __future__ import annotations

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areno_fn.command import main
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import RunSpec
from areno_fn.engine import specfile
from areno_fn.engine.specfile.types import fields, root
from areno_fn.engine.specfile.upgrade import READABLE, UPGRADES, upgraded
from areno_fn.spec import command

OLD = Path(__file__).parents[1] / "specs_v1"
"""Every specification that releases of version 1 came with, and what they packed it into; `-N` counts its changes."""

PACKED = sorted(OLD.glob("*.msgpack"))
TEXTS = sorted(OLD.glob("*.toml"))
PAIRED = [path for path in TEXTS if path.stem not in ("quickstart-1", "quickstart-2")]
"""Of the first quickstarts one was not packed, and one from a file with another number of steps."""


def still_said(before: Any, now: Any) -> Any:
    """`now` without the settings that have come since `before` was written."""
    if isinstance(before, dict) and isinstance(now, dict):
        return {name: still_said(value, now.get(name)) for name, value in before.items()}
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [still_said(one, other) for one, other in zip(before, now, strict=True)]
    return now


def expected(packed: dict[str, Any]) -> dict[str, Any]:
    """The settings of a packed specification of version 1, but for what another version says differently."""
    wanted = copy.deepcopy(packed) | {"version": 2}
    for phase in wanted["phases"]:
        if "stop_at" in phase:
            phase["stop_at"] = phase["stop_at"] or 0.0
    return wanted


def plain(spec: RunSpec) -> Any:
    return json.loads(msgspec.json.encode(spec))


def test_the_old_specifications_are_here() -> None:
    assert (len(PACKED), len(TEXTS)) == (20, 21)
    assert {path.stem.split("-")[0] for path in TEXTS} == {"quickstart", "sft", "grpo", "lora", "dpo", "gspo", "muon"}


@pytest.mark.parametrize("path", PACKED, ids=lambda path: path.stem)
def test_what_version_1_packed_is_still_what_the_run_does(path: Path) -> None:
    """The packed form has every field, so nothing here depends on a default of then or now."""
    packed = msgspec.msgpack.decode(path.read_bytes())
    assert packed["version"] == 1
    spec = specfile.read(path)
    assert spec.version == 2
    assert still_said(packed, plain(spec)) == expected(packed)


@pytest.mark.parametrize("path", PAIRED, ids=lambda path: path.stem)
def test_the_text_of_version_1_is_read_as_what_it_was_packed_into(path: Path) -> None:
    assert specfile.read(path) == specfile.read(path.with_suffix(".msgpack"))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_a_text_is_read_with_all_that_it_says(path: Path) -> None:
    written = tomllib.loads(path.read_text())
    now = plain(specfile.read(path))
    assert still_said(written, now) == written | {"version": 2}
    judged = [phase for phase in (*now["phases"], now["evaluation"]) if phase]
    assert {reward["kind"] for table in judged for reward in table["rewards"]} <= {"function"}


@pytest.mark.parametrize("suffix", [".toml", ".yaml", ".json", ".msgpack"])
def test_an_old_specification_is_read_in_every_format(tmp_path: Path, suffix: str) -> None:
    source = OLD / "lora-4.toml"
    encoders = {".toml": None, ".yaml": json.dumps, ".json": json.dumps, ".msgpack": msgspec.msgpack.encode}
    encode = encoders[suffix]
    data = source.read_text() if encode is None else encode(tomllib.loads(source.read_text()))
    path = tmp_path / f"old{suffix}"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    assert specfile.read(path) == specfile.read(source)


def test_an_upgrade_is_a_function_of_plain_data_and_writes_to_none_of_it() -> None:
    for path in TEXTS:
        raw = tomllib.loads(path.read_text())
        before = copy.deepcopy(raw)
        assert upgraded(raw) == upgraded(raw)
        assert raw == before
        assert upgraded(upgraded(raw)) == upgraded(raw)


def test_there_is_one_upgrade_for_each_version_but_the_last_which_is_written() -> None:
    assert tuple(range(1, len(UPGRADES) + 2)) == READABLE
    assert fields(root())["version"].values == (READABLE[-1],)  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------ version 1


ONE: dict[str, Any] = {
    "model": {"kind": "hf", "path": "m"},
    "phases": [
        {
            "name": "grpo",
            "steps": 1,
            "algorithm": {"kind": "grpo"},
            "data": [{"kind": "arithmetic"}],
            "stop_at": None,
            "optimizers": [{"lr": 0.5}],
            "rewards": [{"function": "m:f"}, {"kind": "function", "function": "m:g"}],
        }
    ],
    "evaluation": {"data": [{"kind": "arithmetic"}], "rewards": [{"function": "m:h"}]},
}


def test_version_1_named_neither_rewards_nor_its_only_optimizer() -> None:
    now = upgraded(ONE)
    (phase,) = now["phases"]
    assert now["version"] == 2
    assert phase["rewards"] == [{"kind": "function", "function": "m:f"}, {"kind": "function", "function": "m:g"}]
    assert phase["optimizers"] == [{"kind": "adamw", "lr": 0.5}]
    assert "stop_at" not in phase
    assert now["evaluation"]["rewards"] == [{"kind": "function", "function": "m:h"}]


@pytest.mark.parametrize("version", [{}, {"version": 1}])
def test_a_file_without_a_version_is_of_the_first(tmp_path: Path, version: dict[str, int]) -> None:
    (tmp_path / "s.json").write_text(json.dumps(ONE | version))
    spec = specfile.read(tmp_path / "s.json")
    assert (spec.version, spec.phases[0].stop_at, spec.phases[0].optimizers[0].lr) == (2, 0.0, 0.5)


def test_what_an_upgrade_does_not_understand_gets_the_usual_sentence(tmp_path: Path) -> None:
    wrong = [
        ({"phases": 3}, "phases must be a list of at least 1, received the number 3"),
        ({"phases": [3]}, "phases.0 must be a table, received the number 3"),
        ({"phases": [{**ONE["phases"][0], "rewards": "m:f"}]}, "phases.grpo.rewards must be a list, received the text 'm:f'"),
        ({"phases": [{**ONE["phases"][0], "rewards": ["m:f"]}]}, "phases.grpo.rewards.0 must be a table with kind "),
        ({"phases": [{**ONE["phases"][0], "stop_at": "x"}]}, "phases.grpo.stop_at must be a number of at least 0, received"),
        ({"evaluation": [1]}, "evaluation must be a table, received a list of 1"),
    ]  # fmt: skip
    for change, sentence in wrong:
        (tmp_path / "s.json").write_text(json.dumps(ONE | change))
        with pytest.raises(SpecError) as caught:
            specfile.read(tmp_path / "s.json")
        assert str(caught.value).startswith(f"{tmp_path / 's.json'}: {sentence}")


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        (3, "version 3 is newer than this release reads, which is 1 or 2; update areno_fn to run it"),
        (10**12, "version 1000000000000 is newer than this release reads, which is 1 or 2; update areno_fn to run it"),
        (0, "version must be 1 or 2, received the number 0"),
        (-1, "version must be 1 or 2, received the number -1"),
        (1.0, "version must be 1 or 2, received the number 1.0"),
        (True, "version must be 1 or 2, received true"),
        ("1", "version must be 1 or 2, received the text '1'"),
        (None, "version must be 1 or 2, received nothing"),
        ([], "version must be 1 or 2, received a list of 0"),
    ],
)
def test_a_version_that_is_not_known_is_said_in_a_sentence(tmp_path: Path, version: Any, sentence: str) -> None:
    """It is said before anything else that a later version may have and this one does not know."""
    (tmp_path / "s.json").write_text(json.dumps({"version": version, "something_of_later": {}}))
    with pytest.raises(SpecError) as caught:
        specfile.read(tmp_path / "s.json", ["seed=1"])
    assert str(caught.value) == f"{tmp_path / 's.json'}: {sentence}"


# ------------------------------------------------------------------------------------------ overrides


def test_overrides_of_an_old_file_may_be_written_as_its_version_has_them() -> None:
    rewards = 'phases.grpo.rewards=[{"function": "m:f"}, {"function": "m:g", "weight": 2}]'
    changes = [rewards, "phases.grpo.rewards.1.weight=3", 'phases.sft.optimizers=[{"lr": 0.25}]']
    spec = specfile.read(OLD / "quickstart-7.toml", [*changes, "evaluation.rewards.exact_match.function=m:h"])
    assert [(reward.function, reward.weight) for reward in spec.phases[1].rewards] == [("m:f", 1.0), ("m:g", 3.0)]
    assert spec.phases[0].optimizers[0].lr == 0.25
    assert spec.evaluation is not None and spec.evaluation.rewards[0].function == "m:h"


@pytest.mark.parametrize("version", ["3", "0", "x"])
def test_no_override_makes_another_version_of_a_file(version: str) -> None:
    with pytest.raises(SpecError, match=rf"^--set version={version}: version must be 2, received the "):
        specfile.read(OLD / "sft-4.toml", [f"version={version}"])


# ------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize("target", ["new.toml", "new.yaml", "new.json", "new.msgpack"])
def test_the_command_writes_what_a_file_says_and_no_defaults(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = OLD / "grpo-5.toml"
    assert main(command, ["upgrade", str(source), str(tmp_path / target)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / target}\n"
    assert specfile.read(tmp_path / target) == specfile.read(source)
    if target == "new.toml":
        wanted = tomllib.loads(source.read_text())
        wanted["phases"][0]["rewards"][0] = {"kind": "function", **wanted["phases"][0]["rewards"][0]}
        assert tomllib.loads((tmp_path / target).read_text()) == wanted | {"version": 2}


def test_the_command_replaces_nothing_and_writes_nothing_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.toml").write_text("precious")
    (tmp_path / "wrong.json").write_text(json.dumps(ONE | {"sed": 1}))
    assert main(command, ["upgrade", str(OLD / "sft-4.toml"), str(tmp_path / "there.toml")]) == 2
    assert main(command, ["upgrade", str(tmp_path / "wrong.json"), str(tmp_path / "new.toml")]) == 2
    there, wrong = capsys.readouterr().err.splitlines()
    assert there.endswith("there.toml: the file exists; pass --force to replace it, or name another")
    assert wrong.endswith("wrong.json: the specification has no field 'sed'; the nearest is 'seed'")
    assert (tmp_path / "there.toml").read_text() == "precious"
    assert not (tmp_path / "new.toml").exists()
    assert main(command, ["upgrade", str(OLD / "sft-4.toml"), str(tmp_path / "there.toml"), "--force"]) == 0


def test_nothing_that_toml_cannot_say_gets_lost_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(ONE | {"tokenizer": None, "evaluation": None}))
    specfile.upgrade(tmp_path / "s.json", tmp_path / "s.toml")
    assert specfile.read(tmp_path / "s.toml") == specfile.read(tmp_path / "s.json")
    config = {"kind": "scratch", "family": "llama", "config": {"rope_scaling": None}}
    (tmp_path / "s.json").write_text(json.dumps(ONE | {"model": config}))
    with pytest.raises(SpecError, match=r"model\.config\.rope_scaling is null, which TOML cannot say"):
        specfile.upgrade(tmp_path / "s.json", tmp_path / "other.toml")
