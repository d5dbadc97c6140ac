"""AdamW (arXiv 1711.05101) with float32 masters, a clip and a schedule."""

from __future__ import annotations

import math

from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.steps.optimizers.adam import scale_by_adam
from areno_fn.steps.optimizers.chain import chain
from areno_fn.steps.optimizers.clip import clip_by_global_norm
from areno_fn.steps.optimizers.decay import add_decayed_weights
from areno_fn.steps.optimizers.master import with_master
from areno_fn.steps.optimizers.rate import scale_by_learning_rate
from areno_fn.steps.schedules import learning_rate


def adamw(spec: AdamWSpec, total_steps: int) -> Optimizer:
    """The optimizer of a specification.

        g <- g min(1, c / (|g| + 1e-6))
        u = Adam(g) + weight_decay p        (decay on matrices only)
        p <- p - lr(step) u

    Equal to `torch.nn.utils.clip_grad_norm_` followed by `torch.optim.AdamW` with two parameter groups.
    It reports grad_norm and lr.

    Args:
        spec: `max_grad_norm = 0` does not clip.
        total_steps: optimizer steps of the phase, where the schedule does not say how long it decays.
    """
    return with_master(
        chain(
            clip_by_global_norm(spec.max_grad_norm or math.inf),
            scale_by_adam(*spec.betas, eps=spec.eps),
            add_decayed_weights(spec.weight_decay),
            scale_by_learning_rate(learning_rate(spec.schedule, spec.lr, total_steps)),
        )
    )
