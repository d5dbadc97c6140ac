"""Gradient descent with momentum, float32 masters, a clip and a schedule."""

from __future__ import annotations

from areno_fn.contracts.calls import checked
from areno_fn.contracts.optim import Optimizer, Transform
from areno_fn.contracts.spec import SGDSpec
from areno_fn.steps.optimizers.chain import chain
from areno_fn.steps.optimizers.groups import assembled, labels_of, settings
from areno_fn.steps.optimizers.momentum import momentum
from areno_fn.steps.optimizers.orthogonal import Placements


@checked
def sgd(spec: SGDSpec, total_steps: int, placements: Placements | None = None) -> Optimizer:
    """The optimizer of a specification.

        g <- g min(1, c / (|g| + 1e-6)) + weight_decay p
        m <- momentum m + g
        p <- p - lr(step) m                 (g + momentum m with nesterov)

    Equal to `torch.nn.utils.clip_grad_norm_` followed by `torch.optim.SGD`: the decay is part of the gradient. It
    reports grad_norm and lr.

    Args:
        spec: `max_grad_norm = 0` does not clip, `momentum = 0` keeps no sum.
        total_steps: optimizer steps of the phase, where the schedule does not say how long it decays.
        placements: by path, how ranks share a leaf, for `decay = "hidden"`.
    """

    def direction() -> Transform:
        return momentum(spec.momentum, spec.nesterov) if spec.momentum else chain()

    parts = settings("sgd", spec, spec.schedule, total_steps, direction, placements=placements, coupled=True)
    return assembled(spec.max_grad_norm, parts, labels_of(spec, placements))
