"""Optimizers as compositions: transforms of gradients, chained, around one place that moves parameters."""

from __future__ import annotations

from areno_fn.steps.optimizers.adam import scale_by_adam
from areno_fn.steps.optimizers.adamw import adamw
from areno_fn.steps.optimizers.chain import chain
from areno_fn.steps.optimizers.clip import clip_by_global_norm, global_norm
from areno_fn.steps.optimizers.decay import add_decayed_weights, matrices
from areno_fn.steps.optimizers.master import with_master
from areno_fn.steps.optimizers.rate import scale_by_learning_rate

__all__ = [
    "adamw",
    "add_decayed_weights",
    "chain",
    "clip_by_global_norm",
    "global_norm",
    "matrices",
    "scale_by_adam",
    "scale_by_learning_rate",
    "with_master",
]
