"""`rms_norm`: y = w * x / sqrt(mean(x^2) + eps) along the last dimension."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn.autodiff import custom_vjp
from areno_fn.kernels.backend import implementation, require
from areno_fn.kernels.rms_norm import reference

__all__ = ["rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centred: bool = False) -> torch.Tensor:
    """Root mean square normalisation of the last dimension.

    `n = x / sqrt(mean(x^2) + eps)` in float32, then `y = w * n` with `n` rounded to the dtype of `x` first, as
    transformers does. Differentiable in `x` and `weight`, once.

    Args:
        x: [..., D], any floating dtype, any number of rows, any strides.
        weight: [D], floating.
        eps: added to the mean square.
        zero_centred: the stored weight is the distance from 1: `y = (1 + w) * n`, all in float32 before the
            one rounding (Gemma, Qwen3-Next).

    Returns:
        [..., D] in the dtype of `x`.

    Raises:
        KernelError: `weight` is not [D], D is 0, a dtype is not floating, or there is no kernel for the device.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019, equation 4.
    """
    fits = x.ndim > 0 and x.shape[-1] > 0 and weight.shape == x.shape[-1:]
    fits = fits and x.is_floating_point() and weight.is_floating_point()
    require(fits, "rms_norm", "x must be floating [..., D] with D > 0 and weight floating [D]", x, weight)
    return _rms_norm(x, weight, eps, zero_centred)


def _pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    del outputs
    dx, dweight = _backward(*cotangents, *inputs)
    return dx, dweight, None, None


_forward = implementation(
    "rms_norm",
    "forward",
    "(Tensor x, Tensor weight, float eps, bool zero_centred) -> Tensor",
    reference.forward,
    lambda x, weight, eps, zero_centred: x.new_empty(x.shape),
)
_backward = implementation(
    "rms_norm",
    "backward",
    "(Tensor dy, Tensor x, Tensor weight, float eps, bool zero_centred) -> (Tensor, Tensor)",
    reference.backward,
    lambda dy, x, weight, eps, zero_centred: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
_rms_norm = custom_vjp(_forward, _pull, keep_outputs=False)
