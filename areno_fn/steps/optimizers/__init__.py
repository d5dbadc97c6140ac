"""Optimizers as compositions: transforms of gradients, chained, around one place that moves parameters."""

from __future__ import annotations

from areno_fn.steps.optimizers.adam import scale_by_adam
from areno_fn.steps.optimizers.adam8bit import adamw8bit, scale_by_adam8bit
from areno_fn.steps.optimizers.adamw import adamw
from areno_fn.steps.optimizers.build import optimizer, optimizer_from
from areno_fn.steps.optimizers.chain import chain
from areno_fn.steps.optimizers.clip import clip_by_global_norm, clipping, global_norm
from areno_fn.steps.optimizers.decay import add_decayed_weights, everything, hidden, matrices
from areno_fn.steps.optimizers.groups import labels_of, layout
from areno_fn.steps.optimizers.master import with_master
from areno_fn.steps.optimizers.momentum import momentum
from areno_fn.steps.optimizers.muon import muon, scale_by_muon
from areno_fn.steps.optimizers.orthogonal import orthogonal
from areno_fn.steps.optimizers.partition import partition
from areno_fn.steps.optimizers.rate import scale_by_learning_rate
from areno_fn.steps.optimizers.sgd import sgd

__all__ = [
    "adamw",
    "adamw8bit",
    "add_decayed_weights",
    "chain",
    "clip_by_global_norm",
    "clipping",
    "everything",
    "global_norm",
    "hidden",
    "labels_of",
    "layout",
    "matrices",
    "momentum",
    "muon",
    "optimizer",
    "optimizer_from",
    "orthogonal",
    "partition",
    "scale_by_adam",
    "scale_by_adam8bit",
    "scale_by_learning_rate",
    "scale_by_muon",
    "sgd",
    "with_master",
]
