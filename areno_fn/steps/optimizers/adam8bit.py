"""AdamW with moments of one byte a number (after arXiv 2110.02861), whose updates are bounded."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.calls import checked
from areno_fn.contracts.key import Key
from areno_fn.contracts.optim import Optimizer, Transform
from areno_fn.contracts.record import record
from areno_fn.contracts.spec import AdamW8bitSpec
from areno_fn.steps.optimizers.adam import bias, corrected
from areno_fn.steps.optimizers.blockwise import Quantised, dequantise, quantise, zeros
from areno_fn.steps.optimizers.groups import assembled, labels_of, settings
from areno_fn.steps.optimizers.orthogonal import Placements

LIMIT = 4.0
"""Largest update. Exact Adam gives 3.2 to the first gradient after a long silence, with betas of 0.9 and 0.999."""


@record
class ScaleByAdam8bitState:
    """The moments of the gradient.

    Attributes:
        count: int64 [], updates made.
        mu: first moment, by path.
        nu: second moment, by path.
    """

    count: torch.Tensor
    mu: dict[str, Quantised]
    nu: dict[str, Quantised]


def scale_by_adam8bit(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Transform:
    """`scale_by_adam` with moments that are stored in one byte a number, and updates clipped to [-4, 4].

    An update is made of moments that are exact but for what storing them did before; what it adds is rounded
    afterwards. Rounding is by chance, as a function of (path, update, place): equal states give equal results. Where
    a moment was rounded badly, the bound holds.
    """

    def init(params: Any) -> ScaleByAdam8bitState:
        named = tree.leaves_with_path(params)
        return ScaleByAdam8bitState(
            count=torch.zeros((), dtype=torch.int64, device=named[0][1].device),
            mu={path: zeros(leaf) for path, leaf in named},
            nu={path: zeros(leaf) for path, leaf in named},
        )

    def update(updates: Any, state: ScaleByAdam8bitState, params: Any) -> tuple[Any, ScaleByAdam8bitState]:
        count = state.count + 1
        bias_1, bias_2 = bias(b1, count), bias(b2, count)
        moves, mu, nu = [], {}, {}
        for (path, _), gradient in zip(tree.leaves_with_path(params), tree.leaves(updates), strict=True):
            first = dequantise(state.mu[path], signed=True).lerp(gradient, 1 - b1)
            second = dequantise(state.nu[path], signed=False).mul(b2).addcmul(gradient, gradient, value=1 - b2)
            (move,) = corrected([first], [second], bias_1, bias_2, eps)
            moves.append(move.clamp(-LIMIT, LIMIT))
            key = Key.of(0).fold(path)
            mu[path] = quantise(first, key.fold("mu"), count, signed=True)
            nu[path] = quantise(second, key.fold("nu"), count, signed=False)
        return tree.unflatten(updates, moves), ScaleByAdam8bitState(count=count, mu=mu, nu=nu)

    return Transform(init=init, update=update)


@checked
def adamw8bit(spec: AdamW8bitSpec, total_steps: int, placements: Placements | None = None) -> Optimizer:
    """The optimizer of a specification: `adamw` with `scale_by_adam8bit`.

    No parameter moves by more than lr (4 + weight_decay |p|) in an update, as long as the squares of gradients are
    finite. It reports grad_norm and lr.

    Args:
        spec: `max_grad_norm = 0` does not clip.
        total_steps: optimizer steps of the phase, where the schedule does not say how long it decays.
        placements: by path, how ranks share a leaf, for `decay = "hidden"`.
    """

    def direction() -> Transform:
        return scale_by_adam8bit(*spec.betas, eps=spec.eps)

    parts = settings("adamw8bit", spec, spec.schedule, total_steps, direction, placements=placements)
    return assembled(spec.max_grad_norm, parts, labels_of(spec, placements))
