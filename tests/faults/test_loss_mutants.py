"""Planted mistakes in losses: every law passes on the library, on a second implementation, and on none of its mutants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from faults import loss_laws as laws
from faults import loss_plain as plain

from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.objectives.value import value_clipped
from areno_fn.steps.returns import gae

Law = Callable[[Any], None]

CASES: dict[str, tuple[Law, Any, Callable[[str | None], Any], tuple[str, ...]]] = {
    "preference": (
        laws.preference_values,
        preference,
        plain.preference,
        (
            "swapped",
            "reference forgotten",
            "beta forgotten",
            "mean for sum",
            "halves for pairs",
            "mean over documents",
            "smoothing forgotten",
            "smoothing inverted",
            "ipo aims at 1 / beta",
            "hinge without its corner",
        ),
    ),
    "sequence_clipped": (
        laws.sequence_values,
        sequence_clipped,
        plain.sequence_clipped,
        (
            "sum for mean",
            "mean of ratios",
            "a term a token",
            "ratio against itself",
            "bounds swapped",
            "never clips",
            "maximum for minimum",
        ),
    ),
    "gae": (
        laws.gae_values,
        gae,
        plain.gae,
        (
            "mask ignored",
            "no bootstrap",
            "value not discounted",
            "lambda forgotten",
            "gamma forgotten",
            "returns are advantages",
        ),
    ),
    "dual clip and importance": (
        laws.corrected_values,
        clipped,
        plain.corrected,
        (
            "dual forgotten",
            "dual bounds from below",
            "dual clip for every advantage",
            "weight inverted",
            "weight not truncated",
            "weight carries a gradient",
        ),
    ),
    "baselines": (
        laws.baseline_values,
        group_advantages,
        plain.baselines,
        ("itself included", "others of the batch", "not scaled", "std divides by n - 1"),
    ),
    "value_clipped": (
        laws.value_values,
        value_clipped,
        plain.value_clipped,
        (
            "never clips",
            "minimum for maximum",
            "clipped error alone",
            "clipped around the return",
            "not halved",
            "coef forgotten",
        ),
    ),
}
MUTANTS = [(name, fault) for name, (_, _, _, faults) in CASES.items() for fault in faults]


@pytest.mark.parametrize("name", CASES)
def test_the_library_keeps_the_law(name: str) -> None:
    law, library, _, _ = CASES[name]
    law(library)


@pytest.mark.parametrize("name", CASES)
def test_a_second_implementation_keeps_the_law(name: str) -> None:
    law, _, build, _ = CASES[name]
    law(build(None))


@pytest.mark.parametrize(("name", "fault"), MUTANTS, ids=[f"{name}-{fault}" for name, fault in MUTANTS])
def test_the_law_kills_the_mutant(name: str, fault: str) -> None:
    law, _, build, _ = CASES[name]
    with pytest.raises(AssertionError):
        law(build(fault))
