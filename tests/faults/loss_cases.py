"""Planted mistakes in losses, estimates and what they are made from."""

from __future__ import annotations

from faults import loss_laws as laws
from faults import loss_plain as plain
from faults.case import Case

from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.kl_control import adapted_kl_coef
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.objectives.value import value_clipped
from areno_fn.steps.returns import explained_variance, gae, whiten

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
            "importance of the sum",
            "importance not truncated",
            "importance carries a gradient",
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
    "whiten": (
        laws.whitened_values,
        whiten,
        plain.whiten,
        (
            "every row by itself",
            "mask ignored",
            "divides by n - 1",
            "epsilon for a spread of nothing",
            "mean kept",
        ),
    ),
    "adapted_kl_coef": (
        laws.controlled_values,
        adapted_kl_coef,
        plain.adapted,
        ("turned round", "error not clipped", "horizon not read"),
    ),
    "explained_variance": (
        laws.explained_values,
        explained_variance,
        plain.explained,
        (
            "second moments",
            "mask ignored",
            "over the variance of values",
            "nothing to explain is divided by",
            "what is left",
        ),
    ),
}
