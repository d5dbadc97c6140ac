"""Every metric that a step reports stands in the table."""

from __future__ import annotations

import re

import torch

from areno_fn.contracts.actions import Actions, Comparisons, Scores
from areno_fn.contracts.metrics import METRICS
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.optimizers import adamw
from areno_fn.steps.reduce import finish
from areno_fn.steps.token.report import mean_metrics

ONE, NOWHERE = torch.ones(1), torch.zeros(1, dtype=torch.int64)


def optimizer_stats(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    params = {"w": torch.ones(2, 2)}
    stats: dict[str, torch.Tensor] = optimizer.apply(params, optimizer.init(params), params)[2]
    return stats


def test_names_are_family_slash_name() -> None:
    families = {"rollout", "train", "dpo", "critic", "flow", "fake", "surrogate", "time"}
    assert all(re.fullmatch(r"(\w+)/\w+", name) and name.split("/")[0] in families for name in METRICS)
    assert all((meaning and meaning[0].islower()) or meaning[0].isdigit() for meaning in METRICS.values())


def test_every_train_metric_is_reported_by_something_and_nothing_else() -> None:
    fields = {"logp": ONE, "weight": ONE, "segments": NOWHERE, "entropy": ONE, "documents": 1}
    actions = Actions(**fields, old=ONE, advantage=ONE, reference=ONE)
    reported = finish(clipped()(actions), optimizer_stats(adamw(AdamWSpec(), 10)))
    assert set(reported) == {name for name in METRICS if name.startswith("train/")}
    assert set(finish(cross_entropy()(Scores(**fields)))) <= set(METRICS)


def test_pairs_and_sequences_report_what_the_table_names() -> None:
    fields = {"logp": torch.ones(2), "weight": torch.ones(2), "segments": torch.arange(2), "entropy": torch.ones(2)}
    compared = finish(preference()(Comparisons(**fields, reference=torch.ones(2), documents=2)))
    assert {name for name in compared if name.startswith("dpo/")} == {n for n in METRICS if n.startswith("dpo/")}
    data = {name: torch.ones(2) for name in ("old", "advantage", "reference")}
    of_sequences = finish(sequence_clipped()(Actions(**fields, **data, documents=2)))
    of_tokens = finish(clipped()(Actions(**fields, **data, documents=2)))
    assert of_sequences.keys() == of_tokens.keys() and {*compared, *of_sequences} <= set(METRICS)


def test_the_table_cannot_be_written_to() -> None:
    assert not hasattr(METRICS, "__setitem__")


def test_several_updates_make_one_report() -> None:
    """Counts add up, maxima stay maxima, and what only one update reports is left out."""
    first = {"train/tokens": 3.0, "train/ratio_max": 2.0, "train/loss": 1.0, "train/kl": 5.0}
    second = {"train/tokens": 4.0, "train/ratio_max": 1.0, "train/loss": 2.0}
    assert mean_metrics([first, second]) == {"train/tokens": 7.0, "train/ratio_max": 2.0, "train/loss": 1.5}
