"""`rotary`: rotates pairs of channels of every head by position-dependent angles."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn.autodiff import custom_vjp
from areno_fn.kernels.backend import implementation, require
from areno_fn.kernels.rotary import reference

__all__ = ["rotary"]


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding in halves: channel i of the first half is paired with channel i of the second.

    `y = (x1 cos - x2 sin, x2 cos + x1 sin)`. `cos` and `sin` are rounded to the dtype of `x` and every product
    and sum is rounded to it, as in transformers. Differentiable in `x`, once; the angles are constants.

    Args:
        x: [..., heads, head_dim], any floating dtype, any number of rows, any strides.
        cos: float32 [..., head_dim / 2], with the leading dimensions of `x`.
        sin: like `cos`.

    Returns:
        [..., heads, head_dim] in the dtype of `x`.

    Raises:
        KernelError: head_dim is odd or 0, `cos` or `sin` does not fit `x`, a dtype is not floating, or there is no
            kernel for the device.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34, with the
    channel pairs of GPT-NeoX.
    """
    fits = x.ndim >= 2 and x.shape[-1] > 0 and x.shape[-1] % 2 == 0
    fits = fits and cos.shape == sin.shape == (*x.shape[:-2], x.shape[-1] // 2)
    fits = fits and x.is_floating_point() and cos.is_floating_point() and sin.is_floating_point()
    wanted = (
        "x must be floating [..., heads, head_dim], head_dim even and > 0, cos and sin floating [..., head_dim / 2]"
    )
    require(fits, "rotary", wanted, x, cos, sin)
    return _rotary(x, cos, sin)


def _pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    del outputs
    _, cos, sin = inputs
    return _backward(*cotangents, cos, sin), None, None


_forward = implementation(
    "rotary",
    "forward",
    "(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    reference.forward,
    lambda x, cos, sin: x.new_empty(x.shape),
)
_backward = implementation(
    "rotary",
    "backward",
    "(Tensor dy, Tensor cos, Tensor sin) -> Tensor",
    reference.backward,
    lambda dy, cos, sin: dy.new_empty(dy.shape),
)
_rotary = custom_vjp(_forward, _pull, drop_inputs=(0,), keep_outputs=False)
