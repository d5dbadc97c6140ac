"""`add_rms_norm`: s = x + r and w * s / sqrt(mean(s^2) + eps), in one pass."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn.autodiff import custom_vjp
from areno_fn.kernels.add_rms_norm import reference
from areno_fn.kernels.backend import implementation, require

__all__ = ["add_rms_norm", "backward", "forward"]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centred: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of two tensors, and the root mean square normalisation of its last dimension.

    `s = x + r`, rounded to the dtype of `x`, and `rms_norm(s, w, eps)`. Differentiable in the three tensors, once,
    through both results.

    Args:
        x: [..., D], any floating dtype, any number of rows, any strides.
        residual: like `x`.
        weight: [D], floating.
        eps: added to the mean square.
        zero_centred: the stored weight is the distance from 1, as for `rms_norm`.

    Returns:
        The sum and the normalised rows, both [..., D] in the dtype of `x`.

    Raises:
        KernelError: the shapes or the dtypes do not fit, D is 0, or there is no kernel for the device.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019, equation 4.
    """
    fits = x.ndim > 0 and x.shape[-1] > 0 and weight.shape == x.shape[-1:] and residual.shape == x.shape
    fits = fits and x.is_floating_point() and residual.dtype == x.dtype and weight.is_floating_point()
    wanted = "x and residual must be floating [..., D] of one dtype with D > 0 and weight floating [D]"
    require(fits, "add_rms_norm", wanted, x, residual, weight)
    total, normal = _add_rms_norm(x, residual, weight, eps, zero_centred)
    return total, normal


def _pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    _, _, *how = inputs
    dx, dweight, _ = backward(*cotangents, outputs[0], *how)
    return dx, dx, dweight, None, None


forward = implementation(
    "add_rms_norm",
    "forward",
    "(Tensor x, Tensor residual, Tensor weight, float eps, bool zero_centred=False) -> (Tensor, Tensor)",
    reference.forward,
    lambda x, residual, weight, eps, zero_centred=False: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
"""`add_rms_norm` itself, without a derivative, for primitives that contain it."""

backward = implementation(
    "add_rms_norm",
    "backward",
    "(Tensor dtotal, Tensor dnormal, Tensor total, Tensor weight, float eps, bool zero_centred=False) "
    "-> (Tensor, Tensor, Tensor)",
    reference.backward,
    lambda dtotal, dnormal, total, weight, eps, zero_centred=False: (
        total.new_empty(total.shape),
        weight.new_empty(weight.shape),
        total.new_empty(total.shape),
    ),
)
"""`(dtotal, dnormal, total, weight, eps, zero_centred) -> (cotangent of both summands, of the weight, normalised rows)`."""

_add_rms_norm = custom_vjp(forward, _pull, drop_inputs=(0, 1))
