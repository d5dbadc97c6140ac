"""`linear_token_loss`: `linear_token_logp` with the gradient of a loss, whose slope is known row by row, in three products."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from areno_fn.autodiff import custom_vjp
from areno_fn.contracts.errors import KernelError
from areno_fn.kernels.backend import backend, require
from areno_fn.kernels.linear_token_loss import reference
from areno_fn.kernels.linear_token_loss.scored import Linear, Scored, Slope

__all__ = ["Linear", "Scored", "Slope", "linear_token_loss"]

CHUNK = 320 * 2**20
"""Logits that exist at once, as a rule: 640 MiB in bfloat16."""


def linear_token_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    slope: Slope,
    scale: float = 1.0,
    *,
    scored: Scored | None = None,
    linear: Linear | None = None,
    entropic: bool = False,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`token_logp(scale * (hidden weight^T), targets)`, and a 0 whose gradient is that of a loss of the log-probabilities.

    For a loss that is a sum of functions of one log-probability each, the slope of a row is known as soon as its
    log-probability is. So some rows of logits are made over the whole vocabulary, and turned into the gradients before
    the next ones are: three products in all, where a gradient that is asked for later takes four. The loss itself is
    computed from the log-probabilities, which carry no gradient here; adding the 0 gives it theirs:

        lever, logp, _ = linear_token_loss(hidden, weight, targets, lambda first, logp, entropy: -torch.ones_like(logp))
        loss = -logp.sum() + lever

    The gradient of `weight` is summed in float32 (float64 for float64) over all rows. Gradients are made in the forward
    pass where an argument needs one, and multiplied by the cotangent of the lever in the backward pass.

    Args:
        hidden: [M, D], floating.
        weight: [V, D], of the same dtype, V > 0.
        targets: int64 [M], each in [0, V). Outside it, the CPU raises and the GPU returns NaN.
        slope: see `Slope`; called once for every part of the rows, in order, outside of any graph. So this primitive
            is not for what is traced.
        scale: factor of the logits, such as one over a temperature; finite and not 0.
        scored: in the place of `token_logp`, for another distribution, such as one of which tokens are cut off; it
            scales by itself.
        linear: what makes the logits, where their bits matter; with `scored` alone. Gradients are plain products.
        entropic: the loss is one of log-probabilities and entropies, and `slope` returns its derivatives in both.
        chunk: logits that may exist at once.

    Returns:
        The lever [], 0 in float32 (float64 for float64), which carries the gradient; logp [M] and entropy [M] of the
        same dtype, in nats, which carry none.

    Raises:
        KernelError: the shapes or dtypes do not fit, or there is no kernel for the device.

    Source: Hsu et al., "Liger Kernel", 2024, section 3.2, for the order of the work.
    """
    fits = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1] and weight.shape[0] > 0
    fits = fits and targets.shape == hidden.shape[:1] and targets.dtype == torch.int64
    fits = fits and hidden.is_floating_point() and hidden.dtype == weight.dtype
    wanted = "hidden must be floating [M, D], weight [V, D] of the same dtype with V > 0, and targets int64 [M]"
    require(fits, "linear_token_loss", wanted, hidden, weight, targets)
    if linear is not None and scored is None:
        raise KernelError(
            "linear_token_loss: logits of another product are scored by the caller; give `scored` with `linear`"
        )
    rows = rows_at_once(hidden.shape[0], weight.shape[0], chunk)
    lever, logp, entropy, _, _ = _linear_token_loss(
        hidden, weight, targets, slope, scale, scored, linear, rows, weight.requires_grad, entropic
    )
    return lever, logp, entropy


_EVEN = 128


def rows_at_once(count: int, size: int, chunk: int) -> int:
    """Rows of a part: as few parts as the chunk allows, alike, and of a number of rows that tiles divide."""
    parts = max(1, -(-count * size // chunk))
    rows = -(-count // parts)
    return max(1, min(count, rows if rows < _EVEN else rows + -rows % _EVEN))


def _forward(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    if backend("linear_token_loss", hidden, weight, targets) == "reference":
        return reference.forward(hidden, weight, targets, *rest)
    made: tuple[torch.Tensor, ...] = importlib.import_module("areno_fn.kernels.linear_token_loss.triton").forward(
        hidden, weight, targets, *rest
    )
    return made


def _pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    weight, trained = inputs[1], inputs[-2]
    dhidden, dweight = outputs[3:]
    factor = cotangents[0]
    into_hidden = factor.to(dhidden.dtype) * dhidden
    if not trained:
        return into_hidden, None, *[None] * 8
    into_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if backend("linear_token_loss", dweight) == "reference":
        torch.mul(dweight, factor, out=into_weight)
    else:
        importlib.import_module("areno_fn.kernels.linear_token_loss.triton").scaled(dweight, factor, into_weight)
    return into_hidden, into_weight, *[None] * 8


_linear_token_loss = custom_vjp(
    _forward, _pull, constant_outputs=(1, 2, 3, 4), drop_inputs=(0, 2), drop_outputs=(0, 1, 2)
)
