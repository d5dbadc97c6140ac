"""`linear_token_logp`: `token_logp` of the logits of a linear head, of which only a part exists at a time."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn.autodiff import custom_vjp
from areno_fn.kernels.backend import implementation, require
from areno_fn.kernels.linear_token_logp import reference

__all__ = ["linear_token_logp"]

CHUNK = 2**27
"""Logits that exist at once, as a rule: 256 MiB in bfloat16."""


def linear_token_logp(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    scale: float = 1.0,
    *,
    entropic: bool = False,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of `token_logp(scale * (hidden weight^T), targets)`.

    The logits are made in the dtype of `hidden` for a part of the vocabulary at a time, weighed, thrown away, and made
    again in the backward pass, so that beside the gradients it needs the memory of one part. Largest logit, sum
    and entropy of the parts are merged in float32. The gradient of `hidden` is summed over the parts in float32,
    that of `weight` within a part, over all rows at once.

    The gradient flows through the log-probability, once, and through the entropy where that is asked for; else the entropy
    is a statistic without one.

    Args:
        hidden: [M, D], floating.
        weight: [V, D], of the same dtype, V > 0.
        targets: int64 [M], each in [0, V). Outside it, the CPU raises and the GPU returns NaN.
        scale: factor of the logits, such as one over a temperature; finite and not 0.
        entropic: the entropy carries a gradient.
        chunk: logits that may exist at once; a part has at least `LEAST` columns.

    Returns:
        logp [M] and entropy [M], float32 (float64 for float64), in nats.

    Raises:
        KernelError: the shapes or dtypes do not fit, or there is no kernel for the device.
    """
    fits = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1] and weight.shape[0] > 0
    fits = fits and targets.shape == hidden.shape[:1] and targets.dtype == torch.int64
    fits = fits and hidden.is_floating_point() and hidden.dtype == weight.dtype
    wanted = "hidden must be floating [M, D], weight [V, D] of the same dtype with V > 0, and targets int64 [M]"
    require(fits, "linear_token_logp", wanted, hidden, weight, targets)
    made = _entropic if entropic else _linear_token_logp
    logp, entropy, _, _ = made(hidden, weight, targets, scale, columns(hidden.shape[0], chunk))
    return logp, entropy


LEAST, EVEN = 1024, 128
"""Columns of the smallest part, and what their number is a multiple of."""


def columns(rows: int, chunk: int) -> int:
    """Columns of a part of the vocabulary, for so many rows and logits."""
    return max(LEAST, chunk // max(rows, 1) // EVEN * EVEN)


def _pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    dlogp, dentropy, _, _ = cotangents
    _, entropy, peak, log_sum = outputs
    dhidden, dweight = _backward(dlogp, dentropy, *inputs, entropy, peak, log_sum)
    return dhidden, dweight, None, None, None


def _pull_logp(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return _pull((cotangents[0], None, *cotangents[2:]), inputs, outputs)


def _rows_like(hidden: Any, weight: Any, targets: Any, scale: float, columns: int) -> tuple[torch.Tensor, ...]:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return tuple(hidden.new_empty(targets.shape, dtype=dtype) for _ in range(4))


_forward = implementation(
    "linear_token_logp",
    "forward",
    "(Tensor hidden, Tensor weight, Tensor targets, float scale, int columns) -> (Tensor, Tensor, Tensor, Tensor)",
    reference.forward,
    _rows_like,
)
_backward = implementation(
    "linear_token_logp",
    "backward",
    "(Tensor dlogp, Tensor? dentropy, Tensor hidden, Tensor weight, Tensor targets, float scale, int columns, Tensor entropy, "
    "Tensor peak, Tensor log_sum) -> (Tensor, Tensor)",
    reference.backward,
    lambda dlogp, dentropy, hidden, weight, *rest: (hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)),
)
_linear_token_logp = custom_vjp(_forward, _pull_logp, constant_outputs=(1, 2, 3))
_entropic = custom_vjp(_forward, _pull, constant_outputs=(2, 3))
