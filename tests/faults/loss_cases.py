"""Planted mistakes in losses, estimates and what they are made from."""

from __future__ import annotations

from faults import loss_laws as laws
from faults import loss_plain as plain
from faults.case import Case

from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.objectives.value import value_clipped
from areno_fn.steps.returns import gae

CASES: dict[str, Case] = {
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
