"""What a specification says as plain data."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from e2e import tiny
from msgspec import field

from areno_fn.contracts.spec import AdamWSpec, FunctionReward, RunSpec, Schedule, SGDSpec
from areno_fn.engine.told import told


class Before(msgspec.Struct, frozen=True, kw_only=True, tag="some", tag_field="kind"):
    """As a release has it."""

    rate: float
    names: list[str] = []
    inner: Schedule = field(default_factory=Schedule)


class After(msgspec.Struct, frozen=True, kw_only=True, tag="some", tag_field="kind"):
    """As a later one has it."""

    rate: float
    fresh: float = 0.0
    names: list[str] = []
    inner: Schedule = field(default_factory=Schedule)
    more: Schedule | None = None


def test_by_hand() -> None:
    spec = AdamWSpec(lr=0.5, schedule=Schedule(kind="linear"))
    assert told(spec, full=False) == {"kind": "adamw", "lr": 0.5, "schedule": {"kind": "linear"}}
    assert told(Schedule(), full=False) == {}
    assert told({"a": [FunctionReward(function="m:f")], "b": (1, None)}, full=False) == {
        "a": [{"kind": "function", "function": "m:f"}],
        "b": [1, None],
    }
    reward = FunctionReward(function="m:f", weight=2.0, timeout=3.0)
    assert told(reward, full=False, aside=("timeout", "function")) == {"kind": "function", "weight": 2.0}


def test_full_is_every_field() -> None:
    spec: Any = msgspec.convert(msgspec.toml.decode(tiny.SPEC), RunSpec)
    assert told(spec, full=True) == msgspec.json.decode(msgspec.json.encode(spec))


def test_a_field_that_has_come_since_is_no_difference_at_its_default() -> None:
    for values in ({"rate": 1.0}, {"rate": 1.0, "names": ["a"], "inner": Schedule(warmup_steps=3)}):
        assert told(Before(**values), full=False) == told(After(**values), full=False)  # type: ignore[arg-type]
        assert told(Before(**values), full=True) != told(After(**values), full=True)  # type: ignore[arg-type]
    assert told(After(rate=1.0, fresh=0.5), full=False) != told(Before(rate=1.0), full=False)
    assert told(After(rate=1.0, more=Schedule()), full=False) == {"kind": "some", "rate": 1.0, "more": {}}


@pytest.mark.parametrize("kind", [AdamWSpec, SGDSpec])
def test_structs_that_differ_are_told_differently(kind: type) -> None:
    base = kind()
    for name, value in {"lr": 0.25, "weight_decay": 0.125, "decay": "all", "schedule": Schedule(min_lr=1e-9)}.items():
        changed = msgspec.structs.replace(base, **{name: value})
        assert told(changed, full=False) != told(base, full=False), name
    assert told(AdamWSpec(), full=False) != told(SGDSpec(), full=False), "the kind counts"
