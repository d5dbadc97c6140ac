"""Every field of an algorithm of text does something, or is refused in a sentence, whatever the others say."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from field_sweep import Sweep
from token_field_runs import AVERAGE, told

from areno_fn.contracts.spec import (
    DPO,
    SFT,
    AlgorithmSpec,
    ArithmeticData,
    Batch,
    FlowAlgorithm,
    FunctionReward,
    HFModel,
    Phase,
    RunSpec,
    SGDSpec,
)
from areno_fn.engine.composition import check_composition
from areno_fn.engine.media import check_medium

KINDS = {
    str(kind.__struct_config__.tag): kind for kind in get_args(AlgorithmSpec) if not issubclass(kind, FlowAlgorithm)
}
_SAMPLED: dict[str, Any] = {
    "samples": 4, "kl_coef": 0.3, "minibatches": 2, "epochs": 2, "reference_every": 1, "importance_cap": 0.9,
    "entropy_coef": 0.1, "clip_low": 0.05, "clip_high": 0.05,
    "sampling": {"max_tokens": 4, "temperature": 0.9, "top_k": 8, "top_p": 0.95, "min_p": 0.01},
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"reference_every": 1, "label_smoothing": 0.1},
    "grpo": _SAMPLED | {"dual_clip": 1.05},
    "gspo": _SAMPLED,
    "ppo": _SAMPLED | {
        "dual_clip": 1.05, "kl_target": 0.05, "kl_horizon": 10, "gamma": 0.9, "lam": 0.8, "critic": {"clip": 0.05},
    },
}  # fmt: skip


def run_of(algorithm: Any) -> RunSpec:
    """A run of one phase of an algorithm."""
    phase = Phase(
        name="it",
        algorithm=algorithm,
        data=[ArithmeticData()],
        steps=20,
        batch=Batch(rows=3),
        optimizers=[SGDSpec(role=role) for role in algorithm.roles],
        rewards=[] if isinstance(algorithm, SFT | DPO) else [FunctionReward(function="a:b")],
        ema=AVERAGE,
    )
    return RunSpec(model=HFModel(path="there"), phases=[phase])


def check(algorithm: Any) -> None:
    """The rules that a phase of an algorithm is held to."""
    spec = run_of(algorithm)
    check_composition(spec)
    check_medium(spec, "qwen3", "text")


def judged(algorithm: Any) -> bytes:
    check(algorithm)
    return told(algorithm)


SWEEP = Sweep(
    kinds=KINDS,
    bases=BASES,
    others={},
    told=judged,
    elsewhere={"critic.path"},  # tests/e2e/test_ppo.py
)


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_does_nothing_in_silence(kind: str) -> None:
    assert SWEEP.silent(SWEEP.base(kind)) == []


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_no_field_does_nothing_beside_another_choice(kind: str) -> None:
    for name, plain in SWEEP.contexts(kind, None):
        assert SWEEP.silent(plain) == [], f"with {name}"
