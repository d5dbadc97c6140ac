"""Every metric that a step reports stands in the table."""

from __future__ import annotations

import re

import torch

from areno_fn.contracts.actions import Actions, Scores
from areno_fn.contracts.metrics import METRICS
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.optimizers import adamw
from areno_fn.steps.reduce import finish

ONE, NOWHERE = torch.ones(1), torch.zeros(1, dtype=torch.int64)


def optimizer_stats(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    params = {"w": torch.ones(2, 2)}
    stats: dict[str, torch.Tensor] = optimizer.apply(params, optimizer.init(params), params)[2]
    return stats


def test_names_are_family_slash_name() -> None:
    families = {"rollout", "train", "dpo", "critic", "time"}
    assert all(re.fullmatch(r"(\w+)/\w+", name) and name.split("/")[0] in families for name in METRICS)
    assert all((meaning and meaning[0].islower()) or meaning[0].isdigit() for meaning in METRICS.values())


def test_every_train_metric_is_reported_by_something_and_nothing_else() -> None:
    fields = {"logp": ONE, "weight": ONE, "segments": NOWHERE, "entropy": ONE, "documents": 1}
    actions = Actions(**fields, old=ONE, advantage=ONE, reference=ONE)
    reported = finish(clipped()(actions), optimizer_stats(adamw(AdamWSpec(), 10)))
    assert set(reported) == {name for name in METRICS if name.startswith("train/")}
    assert set(finish(cross_entropy()(Scores(**fields)))) <= set(METRICS)


def test_the_table_cannot_be_written_to() -> None:
    assert not hasattr(METRICS, "__setitem__")
