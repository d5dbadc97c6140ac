"""AdamW (arXiv 1711.05101) with float32 masters, a clip and a schedule."""

from __future__ import annotations

import math

from areno_fn.contracts.calls import checked
from areno_fn.contracts.optim import Optimizer, Transform
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.steps.optimizers.adam import scale_by_adam
from areno_fn.steps.optimizers.decay import Mask, everything, rule
from areno_fn.steps.optimizers.fused import Numbers, Setting, with_one_pass
from areno_fn.steps.optimizers.groups import assembled, labels_of, settings
from areno_fn.steps.optimizers.orthogonal import Placements
from areno_fn.steps.schedules import learning_rate


@checked
def adamw(spec: AdamWSpec, total_steps: int, placements: Placements | None = None) -> Optimizer:
    """The optimizer of a specification.

        g <- g min(1, c / (|g| + 1e-6))
        u = Adam(g) + weight_decay p        (decay on matrices only, unless `spec.decay` or a group says otherwise)
        p <- p - lr(step) u

    Equal to `torch.nn.utils.clip_grad_norm_` followed by `torch.optim.AdamW` with two parameter groups.
    It reports grad_norm and lr. On a GPU all of it is one pass over the leaves, of every group one, in their own memory
    where the state is donated.

    Args:
        spec: `max_grad_norm = 0` does not clip.
        total_steps: optimizer steps of the phase, where the schedule does not say how long it decays.
        placements: by path, how ranks share a leaf, for `decay = "hidden"`.
    """
    masters = spec.states == "float32"

    def direction() -> Transform:
        return scale_by_adam(*spec.betas, eps=spec.eps, stored=not masters)

    parts = settings("adamw", spec, spec.schedule, total_steps, direction, placements=placements)
    composed = assembled(spec.max_grad_norm, parts, labels_of(spec, placements), masters=masters)
    numbers = Numbers(betas=spec.betas, eps=spec.eps, limit=spec.max_grad_norm or math.inf)

    def setting(lr: float, weight_decay: float, mask: Mask) -> Setting:
        return Setting(schedule=learning_rate(spec.schedule, lr, total_steps), weight_decay=weight_decay, mask=mask)

    own = {"adamw": setting(spec.lr, spec.weight_decay, rule(spec.decay, placements))}
    own |= {group.name: setting(group.lr, group.weight_decay, everything) for group in spec.groups}
    return with_one_pass(composed, numbers, own)
