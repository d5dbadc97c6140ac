"""`gated_silu`: y = silu(gate) * up, for a gate and an up half laid side by side."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn.autodiff import custom_vjp
from areno_fn.kernels.backend import implementation, require
from areno_fn.kernels.gated_silu import reference

__all__ = ["backward_with_value", "forward", "gated_silu"]


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """The SiLU-gated product of the two halves of the last dimension.

    `y = gate * sigmoid(gate) * up`, where `gate` is the first half and `up` the second. Computed in float32;
    `silu(gate)` is rounded to the dtype of the input before the product, as in transformers. Differentiable once.

    Args:
        gate_up: [..., 2 I], any floating dtype, any number of rows, any strides.

    Returns:
        [..., I] in the dtype of `gate_up`.

    Raises:
        KernelError: the last dimension is odd or 0, the dtype is not floating, or there is no kernel for the device.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, SwiGLU without its linear maps.
    """
    fits = gate_up.ndim > 0 and gate_up.shape[-1] > 0 and gate_up.shape[-1] % 2 == 0 and gate_up.is_floating_point()
    require(fits, "gated_silu", "gate_up must be floating [..., 2 I] with I > 0", gate_up)
    return _gated_silu(gate_up)


def _pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    del outputs
    return (_backward(*cotangents, *inputs),)


forward = implementation(
    "gated_silu",
    "forward",
    "(Tensor gate_up) -> Tensor",
    reference.forward,
    lambda gate_up: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
)
"""`gated_silu` itself, without a derivative, for primitives that contain it."""

_backward = implementation(
    "gated_silu",
    "backward",
    "(Tensor dy, Tensor gate_up) -> Tensor",
    reference.backward,
    lambda dy, gate_up: gate_up.new_empty(gate_up.shape),
)
backward_with_value = implementation(
    "gated_silu",
    "backward_with_value",
    "(Tensor dy, Tensor gate_up) -> (Tensor, Tensor)",
    reference.backward_with_value,
    lambda dy, gate_up: (
        gate_up.new_empty(gate_up.shape),
        gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
    ),
)
"""`(dy, gate_up) -> (cotangent of gate_up, gated_silu(gate_up))`, for primitives that keep the input alone."""

_gated_silu = custom_vjp(forward, _pull, keep_outputs=False)
