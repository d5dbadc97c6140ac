"""Schedules against hand-worked numbers and against torch's own schedulers."""

from __future__ import annotations

import math

import pytest
import torch

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import Schedule
from areno_fn.steps.schedules import learning_rate

COSINE = learning_rate(Schedule(kind="cosine", min_lr=1e-7), 1e-6, 1000)


@pytest.mark.parametrize(
    ("step", "value"), [(1, "9.9999778e-07"), (250, "8.68198e-07"), (500, "5.5e-07"), (1000, "1e-07")]
)
def test_cosine_values_of_the_table(step: int, value: str) -> None:
    digits = len(value.split("e")[0].replace(".", ""))
    assert f"{COSINE(step):.{digits - 1}e}".replace("e-0", "e-") == f"{float(value):.{digits - 1}e}".replace(
        "e-0", "e-"
    )


def test_ends_are_exact() -> None:
    for kind in ("linear", "cosine", "wsd"):
        rate = learning_rate(Schedule(kind=kind, min_lr=1e-7, warmup_steps=10, stable_steps=5), 3e-6, 100)
        assert rate(10) == 3e-6 and rate(100) == 1e-7 and rate(10_000) == 1e-7
    assert learning_rate(Schedule(kind="constant", min_lr=1e-7), 3e-6, 10)(7) == 3e-6


def test_warmup_counts_from_one() -> None:
    for kind in ("constant", "linear", "cosine", "wsd"):
        rate = learning_rate(Schedule(kind=kind, warmup_steps=4), 8.0, 100)
        assert [rate(s) for s in (1, 2, 3, 4)] == [2.0, 4.0, 6.0, 8.0]


def test_linear_and_wsd_values() -> None:
    linear = learning_rate(Schedule(kind="linear", warmup_steps=2, min_lr=1.0), 5.0, 10)
    assert [linear(s) for s in (2, 4, 6, 8, 10)] == [5.0, 4.0, 3.0, 2.0, 1.0]
    wsd = learning_rate(Schedule(kind="wsd", warmup_steps=2, stable_steps=4, min_lr=1.0), 5.0, 10)
    assert [wsd(s) for s in range(1, 12)] == [2.5, 5.0, 5.0, 5.0, 5.0, 5.0, 4.0, 3.0, 2.0, 1.0, 1.0]


def test_decay_steps_stand_before_the_total() -> None:
    assert learning_rate(Schedule(kind="linear", decay_steps=4), 8.0, 100)(2) == 4.0
    assert learning_rate(Schedule(kind="linear"), 8.0, 100)(50) == 4.0


def test_a_warmup_longer_than_the_run() -> None:
    rate = learning_rate(Schedule(kind="cosine", warmup_steps=20), 1.0, 10)
    assert rate(10) == 0.5 and rate(20) == 1.0 and rate(21) == 0.0


def test_O9_the_rate_is_a_function_of_the_step_alone() -> None:
    """Saved at 3 and resumed: lr(4) equals the uninterrupted run's, whatever was asked for before."""
    fresh = learning_rate(Schedule(kind="cosine", min_lr=1e-7), 1e-6, 1000)
    uninterrupted = [COSINE(s) for s in range(1, 6)]
    assert fresh(4) == uninterrupted[3] and fresh(4) == fresh(4) and [fresh(s) for s in range(1, 6)] == uninterrupted


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_integers_and_tensors_agree_bit_for_bit(kind: str) -> None:
    rate = learning_rate(Schedule(kind=kind, min_lr=1e-7, warmup_steps=7, stable_steps=5), 1e-6, 60)
    for step in range(1, 70):
        value = rate(torch.tensor(step))
        assert value.dtype == torch.float64 and value.ndim == 0 and value.item() == rate(step)
        assert 0 < rate(step) <= 1e-6


def test_against_torch_schedulers() -> None:
    """Torch's schedulers count from 0, so that their step s is the rate after s decays."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1e-3)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=1e-4)
    ours = learning_rate(Schedule(kind="cosine", min_lr=1e-4), 1e-3, 50)
    for step in range(1, 51):
        optimizer.step()
        theirs.step()
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        assert ours(step) == pytest.approx(1e-4 + 9e-4 * (1 + math.cos(math.pi * step / 50)) / 2, rel=1e-14)


def test_refusals() -> None:
    with pytest.raises(SpecError, match="steps are counted from 1, and a schedule was asked for step 0"):
        COSINE(0)
    with pytest.raises(SpecError, match=r"decays from lr=1e-06 to min_lr=0\.1, which is larger"):
        learning_rate(Schedule(kind="linear", min_lr=0.1), 1e-6, 10)
