"""`gated_gelu`: y = gelu(gate) * up, for a gate and an up half laid side by side."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn.autodiff import custom_vjp
from areno_fn.kernels.backend import implementation, require
from areno_fn.kernels.gated_gelu import reference

__all__ = ["backward_with_value", "forward", "gated_gelu"]


def gated_gelu(gate_up: torch.Tensor, *, approximate: bool = False) -> torch.Tensor:
    """The GELU-gated product of the two halves of the last dimension.

    `y = gate * Phi(gate) * up`, where `gate` is the first half, `up` the second, and Phi the distribution function of
    the normal distribution. Computed in float32; `gelu(gate)` is rounded to the dtype of the input before the product,
    as in transformers. Differentiable once.

    Args:
        gate_up: [..., 2 I], any floating dtype, any number of rows, any strides.
        approximate: Phi(x) is (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, "gelu_pytorch_tanh" in checkpoints
            (Gemma).

    Returns:
        [..., I] in the dtype of `gate_up`.

    Raises:
        KernelError: the last dimension is odd or 0, the dtype is not floating, or there is no kernel for the device.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, GEGLU without its linear maps; Hendrycks and Gimpel,
        "Gaussian Error Linear Units", 2016.
    """
    fits = gate_up.ndim > 0 and gate_up.shape[-1] > 0 and gate_up.shape[-1] % 2 == 0 and gate_up.is_floating_point()
    require(fits, "gated_gelu", "gate_up must be floating [..., 2 I] with I > 0", gate_up)
    return _gated_gelu(gate_up, approximate)


def _pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    del outputs
    return _backward(*cotangents, *inputs), None


def _half(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


forward = implementation(
    "gated_gelu",
    "forward",
    "(Tensor gate_up, bool approximate) -> Tensor",
    reference.forward,
    lambda gate_up, approximate: _half(gate_up),
)
"""`gated_gelu` itself, without a derivative, for primitives that contain it."""

_backward = implementation(
    "gated_gelu",
    "backward",
    "(Tensor dy, Tensor gate_up, bool approximate) -> Tensor",
    reference.backward,
    lambda dy, gate_up, approximate: gate_up.new_empty(gate_up.shape),
)
backward_with_value = implementation(
    "gated_gelu",
    "backward_with_value",
    "(Tensor dy, Tensor gate_up, bool approximate) -> (Tensor, Tensor)",
    reference.backward_with_value,
    lambda dy, gate_up, approximate: (gate_up.new_empty(gate_up.shape), _half(gate_up)),
)
"""`(dy, gate_up, approximate) -> (cotangent of gate_up, gated_gelu(gate_up))`, for primitives that keep the input alone."""

_gated_gelu = custom_vjp(forward, _pull, keep_outputs=False)
