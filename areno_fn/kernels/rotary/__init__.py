"""`rotary`: rotates pairs of channels of every head by position-dependent angles."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn.autodiff import custom_vjp
from areno_fn.kernels.backend import implementation, require
from areno_fn.kernels.rotary import reference

__all__ = ["rotary"]


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotary position embedding: pairs of the first R channels are turned, R being twice the number of angles.

    A pair (x1, x2) becomes `(x1 cos - x2 sin, x2 cos + x1 sin)`. Channel i of the first half of the R channels is
    paired with channel i of the second, or, interleaved, channel 2 i with channel 2 i + 1. Channels past R stay as they
    are. `cos` and `sin` are rounded to the dtype of `x` and every product and sum is rounded to it, as in transformers.
    Differentiable in `x`, once; the angles are constants.

    Args:
        x: [..., heads, head_dim], any floating dtype, any number of rows, any strides.
        cos: float32 [..., R / 2], with the leading dimensions of `x` and 0 < R <= head_dim.
        sin: like `cos`.
        interleaved: pairs lie side by side.

    Returns:
        [..., heads, head_dim] in the dtype of `x`.

    Raises:
        KernelError: head_dim is odd or 0, `cos` or `sin` does not fit `x`, a dtype is not floating, or there is no
            kernel for the device.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34: interleaved
    there, with the channel pairs of GPT-NeoX otherwise.
    """
    fits = x.ndim >= 2 and x.shape[-1] > 0 and x.shape[-1] % 2 == 0 and cos.ndim == x.ndim - 1
    fits = fits and cos.shape == sin.shape and cos.shape[:-1] == x.shape[:-2] and 0 < 2 * cos.shape[-1] <= x.shape[-1]
    fits = fits and x.is_floating_point() and cos.is_floating_point() and sin.is_floating_point()
    wanted = (
        "x must be floating [..., heads, head_dim], head_dim even and > 0, cos and sin floating [..., R / 2] with "
        "0 < R <= head_dim"
    )
    require(fits, "rotary", wanted, x, cos, sin)
    return _rotary(x, cos, sin, interleaved)


def _pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    del outputs
    _, *how = inputs
    return _backward(*cotangents, *how), None, None, None


_forward = implementation(
    "rotary",
    "forward",
    "(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
    reference.forward,
    lambda x, cos, sin, interleaved: x.new_empty(x.shape),
)
_backward = implementation(
    "rotary",
    "backward",
    "(Tensor dy, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
    reference.backward,
    lambda dy, cos, sin, interleaved: dy.new_empty(dy.shape),
)
_rotary = custom_vjp(_forward, _pull, drop_inputs=(0,), keep_outputs=False)
