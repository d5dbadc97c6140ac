"""Every field of an algorithm of flow models does something, or is refused in a sentence, whatever the others say."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from field_sweep import Sweep
from flow_field_runs import AVERAGE, SETS, told

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
    "old": [None, _FORGETS],
    "teacher": ["folder", ""],
    "teachers": [[{"path": "folder", "data": [SETS[0]]}, {"path": "other", "data": [SETS[1]]}]],
    "teachers.0.path": ["other"],
    "teachers.1.path": ["folder"],
    "teachers.0.data": [[SETS[1]]],
    "teachers.1.data": [[SETS[0]]],
    "denoising.noisy": [[0, 1, 3], [0, 1, 2, 4]],
}
"""Other values of what is no number and no choice."""


def run_of(algorithm: Any) -> RunSpec:
    """A run of adapters that keeps an average, of one phase of an algorithm."""
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
    return RunSpec(model=HFModel(path="there"), finetune=Lora(), phases=[phase])


def check(algorithm: Any) -> None:
    """The rules that a phase of an algorithm is held to."""
    spec = run_of(algorithm)
    check_composition(spec)
    check_medium(spec, "digits_dit", "pictures")


def judged(algorithm: Any) -> bytes:
    check(algorithm)
    return told(algorithm)


SWEEP = Sweep(kinds=KINDS, bases=BASES, others=OTHERS, told=judged)


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_does_nothing_in_silence(kind: str) -> None:
    assert SWEEP.silent(SWEEP.base(kind)) == []


CHOSEN = ("flow_sft", "flow_dpo", "flow_grpo", "flow_dmd2", "flow_tdm", "flow_distill")
"""The kinds that stand for those with the same fields: of others only what is their own is tried beside other choices."""


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_does_nothing_beside_another_choice(kind: str) -> None:
    own = None if kind in CHOSEN else KINDS[kind].__annotations__.keys() - FlowGrouped.__annotations__.keys()
    for name, plain in SWEEP.contexts(kind, own):
        assert SWEEP.silent(plain, own) == [], f"with {name}"


def test_a_field_that_nothing_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels that are drawn in one way, whatever `times` and `shift` say."""
    monkeypatch.setattr(flow_supervised, "Times", lambda **fields: Times())
    anew = Sweep(kinds=KINDS, bases=BASES, others=OTHERS, told=judged)
    found = anew.silent(anew.base("flow_sft"))
    assert found == [
        "times: 'uniform' in the place of 'logit_normal' does nothing",
        "shift: 0.5 in the place of 1.0 does nothing",
    ]
