"""Every field of an algorithm of flow models does something, or is refused in a sentence, whatever the others say."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Container, Iterator
from typing import Any, get_args

import msgspec
import pytest
from field_values import Place, changed, dotted, places, value_at
from flow_field_runs import AVERAGE, SETS, told
from msgspec import inspect

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import (
    AlgorithmSpec,
    Batch,
    DigitPairsData,
    DigitsData,
    FlowAlgorithm,
    FlowDPO,
    FlowGrouped,
    FunctionReward,
    HFModel,
    Lora,
    Phase,
    RunSpec,
    SGDSpec,
)
from areno_fn.engine.composition import check_composition
from areno_fn.engine.media import check_medium
from areno_fn.engine.specfile.types import plain_copy
from areno_fn.steps.flow.times import Times
from areno_fn.steps.recipes import flow_supervised

KINDS = {str(kind.__struct_config__.tag): kind for kind in get_args(AlgorithmSpec) if issubclass(kind, FlowAlgorithm)}
_FORGETS = {"start": 0.2, "flat": 0, "rate": 0.05, "cap": 0.22}
_GROUPED = {
    "samples": 4, "kl_coef": 0.3, "max_advantage": 1.2, "minibatches": 2, "reference_every": 1,
}  # fmt: skip
_NOISY = _GROUPED | {"denoising": {"steps": 5, "guidance": 1.5, "noisy": [0, 1, 2, 3], "count": 2}}
_NOISED = _GROUPED | {"denoising": {"steps": 4, "guidance": 1.5}, "until": 0.8}
_MATCHED = {"samples": 2, "teacher_guidance": 2.0, "fake_updates": 2, "denoising": {"steps": 2, "guidance": 1.5}}
BASES: dict[str, dict[str, Any]] = {
    "flow_sft": {"condition_dropout": 0.5},
    "flow_dpo": {"reference_every": 1, "beta": 20.0, "until": 0.8},
    "flow_grpo": _NOISY | {"clip_low": 0.01, "clip_high": 0.01},
    "flow_grpo_guard": _NOISY | {"clip_low": 0.01, "clip_high": 0.01},
    "flow_dppo": _NOISY | {"threshold": 1e-3},
    "flow_nft": _NOISED | {"old": _FORGETS},
    "flow_awm": _NOISED | {"ema_coef": 0.2},
    "flow_dgpo": _NOISED | {"old": _FORGETS, "draw_old": 3, "reference_guidance": 2.0, "beta": 2.0},
    "flow_crd": _NOISED | {"old": _FORGETS, "sampler": _FORGETS, "reference_guidance": 2.0},
    "flow_online_dpo": _NOISED | {"kl_coef": 0.0, "max_advantage": 5.0, "beta": 20.0},
    "flow_dmd2": _MATCHED,
    "flow_tdm": _MATCHED,
    "flow_tdm_r1": _MATCHED | {"samples": 4, "slow": _FORGETS, "max_advantage": 1.2, "trust": 0.03, "runaway": 0.05},
    "flow_distill": {"samples": 2, "teacher_guidance": 2.0, "denoising": {"steps": 3, "guidance": 1.5}},
}  # fmt: skip
"""Algorithms whose every setting can show itself in two iterations: thresholds are near, and nothing is switched off."""

OTHERS: dict[str, list[Any]] = {
    "teacher": ["folder", ""],
    "teachers": [[{"path": "folder", "data": [SETS[0]]}, {"path": "other", "data": [SETS[1]]}]],
    "teachers.0.path": ["other"],
    "teachers.1.path": ["folder"],
    "teachers.0.data": [[SETS[1]]],
    "teachers.1.data": [[SETS[0]]],
    "denoising.noisy": [[0, 1, 3], [0, 1, 2, 4]],
}
"""Other values of what is no number and no choice."""


@functools.cache
def field_type(kind: str) -> inspect.Type:
    return inspect.type_info(KINDS[kind])


def base(kind: str) -> dict[str, Any]:
    """The plain data of an algorithm with every field spelled out."""
    found: dict[str, Any] = plain_copy(msgspec.convert({"kind": kind} | BASES[kind], KINDS[kind]))
    return found


def others(place: Place, info: inspect.Type, value: Any) -> list[Any]:
    """Other values that a field of this type might have."""
    name = dotted(place)
    if name in OTHERS:
        return [one for one in OTHERS[name] if one != value]
    match info:
        case inspect.LiteralType():
            return [one for one in info.values if one != value]
        case inspect.BoolType():
            return [not value]
        case inspect.IntType():
            return [value + 1, value - 1, 2 * value, value + 50, 0, value // 2]
        case inspect.FloatType():
            return [value / 2, value * 2, value * 1.2, 0.0, value * 50, value / 50, value + 0.5, 1e-4]
        case inspect.UnionType():
            return [None if value is not None else _FORGETS]
    return []


def is_choice(info: inspect.Type) -> bool:
    return isinstance(info, inspect.LiteralType | inspect.BoolType | inspect.UnionType)


@functools.cache
def outcome(text: str) -> bytes | str | None:
    """What iterations leave, the sentence with which they are refused, or nothing where a value is of no legal type."""
    plain = json.loads(text)
    kind = KINDS[plain["kind"]]
    try:
        algorithm = msgspec.convert(plain, kind)
    except msgspec.ValidationError:
        return None
    try:
        check(algorithm)
        return told(algorithm)
    except SpecError as error:
        return str(error)


def check(algorithm: Any) -> None:
    """The rules that a phase of an algorithm is held to, in a run of adapters that keeps an average."""
    rewarded = algorithm.execution.feedback == "runtime_reward"
    phase = Phase(
        name="it",
        algorithm=algorithm,
        data=[(DigitPairsData if isinstance(algorithm, FlowDPO) else DigitsData)(name=name, limit=2) for name in SETS],
        steps=20,
        batch=Batch(rows=4),
        optimizers=[SGDSpec(role=role) for role in algorithm.roles],
        rewards=[FunctionReward(function="a:b")] if rewarded else [],
        ema=AVERAGE,
    )
    spec = RunSpec(model=HFModel(path="there"), finetune=Lora(), phases=[phase])
    check_composition(spec)
    check_medium(spec, "digits_dit", "pictures")


def told_by(plain: dict[str, Any]) -> bytes | str | None:
    return outcome(json.dumps(plain))


def effects(plain: dict[str, Any], place: Place, info: inspect.Type) -> Iterator[tuple[Any, bytes | str]]:
    """What other legal values of a field lead to."""
    for value in others(place, info, value_at(plain, place)):
        found = told_by(changed(plain, place, value))
        if found is not None and value != value_at(plain, place):
            yield value, found


def silent(plain: dict[str, Any], among: Container[str] | None = None) -> list[str]:
    """The fields, with a value each, that change nothing and are not refused; those of some names alone.

    Of a choice every value must do something, of a number some value.
    """
    now = told_by(plain)
    assert isinstance(now, bytes), f"the settings to begin with are refused: {now}"
    found = []
    for place, info in places(field_type(plain["kind"]), plain):
        if isinstance(info, inspect.StructType) or (among is not None and place[0] not in among):
            continue
        dead, done, known = [], False, False
        for value, after in effects(plain, place, info):
            known = True
            dead += [value] if after == now else []
            done = done or after != now
            if done and not is_choice(info):
                break
        if not known:
            found.append(f"{dotted(place)}: the test knows no other value of it")
        elif dead and (is_choice(info) or not done):
            found.append(f"{dotted(place)}: {dead[0]!r} in the place of {value_at(plain, place)!r} does nothing")
    return found


def contexts(kind: str, among: Container[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The algorithm with every other choice and without what may be left out; what is then refused is at its default."""
    first = base(kind)
    for place, info in list(places(field_type(kind), first)):
        if among is not None and place[0] not in among:
            continue
        for value in others(place, info, value_at(first, place)) if is_choice(info) else ():
            plain = made_legal(changed(first, place, value), place)
            if plain is not None:
                yield f"{dotted(place)} = {json.dumps(value)}", plain


def made_legal(plain: dict[str, Any], kept: Place) -> dict[str, Any] | None:
    """The algorithm with defaults in the place of what is refused beside a setting; None where that itself is."""
    for _ in range(8):
        said = told_by(plain)
        if not isinstance(said, str):
            return None if said is None else plain
        match = re.match(r"phases\.it\.algorithm\.([\w.]+):", said)
        place = tuple(match[1].split(".")) if match else ()
        usual = plain_copy(msgspec.convert({"kind": plain["kind"]}, KINDS[plain["kind"]]))
        if not place or place == kept or not (_has(plain, place) and _has(usual, place)):
            return None
        plain = changed(plain, place, value_at(usual, place))
    return None


def _has(plain: Any, place: Place) -> bool:
    for key in place:
        if not isinstance(plain, dict) or key not in plain:
            return False
        plain = plain[key]
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_does_nothing_in_silence(kind: str) -> None:
    assert silent(base(kind)) == []


CHOSEN = ("flow_sft", "flow_dpo", "flow_grpo", "flow_dmd2", "flow_tdm", "flow_distill")
"""The kinds that stand for those with the same fields: of others only what is their own is tried beside other choices."""


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_does_nothing_beside_another_choice(kind: str) -> None:
    own = None if kind in CHOSEN else KINDS[kind].__annotations__.keys() - FlowGrouped.__annotations__.keys()
    for name, plain in contexts(kind, own):
        assert silent(plain, own) == [], f"with {name}"


def test_a_field_that_nothing_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels that are drawn in one way, whatever `times` and `shift` say."""
    monkeypatch.setattr(flow_supervised, "Times", lambda **fields: Times())
    outcome.cache_clear()
    found = silent(base("flow_sft"))
    outcome.cache_clear()
    assert found == [
        "times: 'uniform' in the place of 'logit_normal' does nothing",
        "shift: 0.5 in the place of 1.0 does nothing",
    ]
