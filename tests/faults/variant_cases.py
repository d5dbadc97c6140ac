"""Planted mistakes in averages, in what is derived from parameters, and in moves to the host."""

from __future__ import annotations

from faults import variant_laws as laws
from faults import variant_plain as plain
from faults.case import Case

from areno_fn.engine.derived import Derived
from areno_fn.engine.residency import offload
from areno_fn.steps.variants import averaged, ema_update, snapshot

CASES: dict[str, Case] = {
    "ema_update": (
        laws.averages,
        ema_update,
        plain.ema_update,
        (
            "decay on the new",
            "in the dtype of the parameters",
            "writes to the average",
            "copies by arithmetic",
            "the parameters themselves at 0",
            "moves at 1",
        ),
    ),
    "averaged": (
        laws.cadence,
        averaged,
        plain.averaged,
        ("every step", "counts from the start", "stands still until the start", "copies count", "one step late"),
    ),
    "snapshot": (laws.stands_alone, snapshot, plain.snapshot, ("the same tensors", "views", "unties")),
    "derived": (
        laws.never_stale,
        Derived,
        plain.derived,
        (
            "by address",
            "by value of the first leaf",
            "blind to writing",
            "by structure",
            "holds two",
            "never made again",
        ),
    ),
    "offload": (
        laws.moves_exactly,
        offload,
        plain.offload,
        ("unties", "lays out anew", "views the source", "quiets NaNs", "flat"),
    ),
}
