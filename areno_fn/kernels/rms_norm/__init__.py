"""`rms_norm`: y = w * x / sqrt(mean(x^2) + eps) along the last dimension."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn.autodiff import custom_vjp
from areno_fn.kernels.backend import implementation, require
from areno_fn.kernels.rms_norm import reference

__all__ = ["rms_norm"]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    gate: torch.Tensor | None = None,
    zero_centred: bool = False,
) -> torch.Tensor:
    """Root mean square normalisation of the last dimension, times the SiLU of a gate where there is one.

    `n = x / sqrt(mean(x^2) + eps)` in float32, then `y = w * n` with `n` rounded to the dtype of `x` first, as
    transformers does. With a gate the result is `y * silu(gate)`, of y rounded, formed in float32. Differentiable
    in `x`, `weight` and `gate`, once.

    Args:
        x: [..., D], any floating dtype, any number of rows, any strides.
        weight: [D], floating.
        eps: added to the mean square.
        gate: like `x`, or None (the gated norm of Qwen3-Next and Mamba 2 with the norm before the gate).
        zero_centred: the stored weight is the distance from 1: `y = (1 + w) * n`, all in float32 before the
            one rounding (Gemma, Qwen3-Next).

    Returns:
        [..., D] in the dtype of `x`.

    Raises:
        KernelError: `weight` is not [D], the gate is not like `x`, D is 0, a dtype is not floating, or there is no
            kernel for the device.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019, equation 4.
    """
    fits = x.ndim > 0 and x.shape[-1] > 0 and weight.shape == x.shape[-1:]
    fits = fits and x.is_floating_point() and weight.is_floating_point()
    require(fits, "rms_norm", "x must be floating [..., D] with D > 0 and weight floating [D]", x, weight)
    if gate is not None:
        alike = gate.shape == x.shape and gate.dtype == x.dtype
        require(alike, "rms_norm", "the gate must have the shape and the dtype of x", x, gate)
    return _rms_norm(x, weight, gate, eps, zero_centred)


def _pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    del outputs
    dx, dweight, dgate = _backward(*cotangents, *inputs)
    return dx, dweight, None if inputs[2] is None else dgate, None, None


_forward = implementation(
    "rms_norm",
    "forward",
    "(Tensor x, Tensor weight, Tensor? gate, float eps, bool zero_centred) -> Tensor",
    reference.forward,
    lambda x, weight, gate, eps, zero_centred: x.new_empty(x.shape),
)
_backward = implementation(
    "rms_norm",
    "backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor? gate, float eps, bool zero_centred) -> (Tensor, Tensor, Tensor)",
    reference.backward,
    lambda dy, x, weight, gate, eps, zero_centred: (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        x.new_empty(0 if gate is None else gate.shape),
    ),
)
_rms_norm = custom_vjp(_forward, _pull, keep_outputs=False)
