"""Planted mistakes in reductions, schedules and the first losses."""

from __future__ import annotations

from faults import step_laws as laws
from faults import step_plain as plain
from faults.case import Case

from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.compose import accumulate
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.kl import kl
from areno_fn.steps.optimizers import adamw, clip_by_global_norm
from areno_fn.steps.reduce import aggregate
from areno_fn.steps.schedules import learning_rate

CASES: dict[str, Case] = {
    "accumulate": (
        laws.accumulation_is_exact,
        accumulate,
        plain.accumulate,
        ("mean of means", "sum of means", "last micro-batch only", "accumulates in bfloat16", "divides by zero"),
    ),
    "aggregate": (
        laws.aggregation_values,
        aggregate,
        plain.aggregate,
        ("mask multiplies", "denominator counts the masked", "token sum is averaged", "epsilon in the denominator"),
    ),
    "kl": (
        laws.kl_values,
        kl,
        plain.kl,
        (
            "difference reversed",
            "computed without gradient",
            "k2 not halved",
            "clamp keeps the gradient",
            "not clamped",
        ),
    ),
    "clipped": (
        laws.clipped_values,
        clipped,
        plain.clipped,
        (
            "ratio against itself",
            "ratio inverted",
            "bounds swapped",
            "bounds not around 1",
            "never clips",
            "maximum for minimum",
            "clips both ways",
            "sign of the loss",
            "kl subtracted",
            "kl forgotten",
            "kl without gradient",
        ),
    ),
    "group_advantages": (
        laws.advantage_values,
        group_advantages,
        plain.group_advantages,
        (
            "std divides by n - 1",
            "epsilon inside the root",
            "no epsilon",
            "scopes swapped",
            "not centred",
            "centred on the batch",
            "groups are rows in order",
        ),
    ),
    "learning_rate": (
        laws.schedule_values,
        learning_rate,
        plain.learning_rate,
        (
            "counts from zero",
            "one ahead",
            "warm-up one ahead",
            "no stable part",
            "decay ignores warm-up",
            "progress not clipped",
            "minimum ignored",
        ),
    ),
    "clip_by_global_norm": (
        laws.clip_values,
        clip_by_global_norm,
        plain.clip_by_global_norm,
        ("scales up", "maximum for minimum", "sign lost", "by the squared norm", "each leaf alone", "by value"),
    ),
    "adamw": (
        laws.adamw_is_torchs,
        adamw,
        plain.adamw,
        (
            "rate one ahead",
            "decay on norms",
            "decay in the gradient",
            "decay without the rate",
            "second moment of g",
            "bias one late",
            "no bias correction",
            "eps inside the root",
            "ascends",
            "clip forgotten",
            "cast copy is the truth",
            "writes into its argument",
        ),
    ),
}
