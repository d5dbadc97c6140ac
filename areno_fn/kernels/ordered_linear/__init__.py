"""`ordered_linear`: the affine map whose rows have the same bits alone and among others, on the GPU too."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from areno_fn.autodiff import custom_vjp
from areno_fn.contracts.adapter import Adapted, Weight
from areno_fn.kernels.backend import implementation, require
from areno_fn.kernels.linear import filled, linear_into_input, linear_into_weights
from areno_fn.kernels.ordered_linear import reference

__all__ = ["ordered_linear"]


def ordered_linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`y = x weight^T + bias`, every element of which is summed over the columns of x in one order.

    So a row does not depend on how many rows there are, which is not so of a library that chooses how to split a sum by the
    shape. On the CPU it is `linear`, which sees to it as far as the BLAS allows. Differentiable in all three, once, by plain
    products: gradients depend on the number of rows by roundings.

    Args:
        x: [..., D], floating; bfloat16 or float16 on the GPU.
        weight: [E, D] of the same dtype, with D, E > 0; an adapted one is multiplied as in `linear`.
        bias: [E] of the same dtype, or None.

    Returns:
        [..., E] in the dtype of `x`, summed in float32.

    Raises:
        KernelError: shapes or dtypes do not fit, or there is no kernel for the device.

    Source: He et al., "Defeating nondeterminism in LLM inference", 2025, on why shapes decide about bits.
    """
    if isinstance(weight, Adapted):
        a, b = filled(weight.a.to(x.dtype), weight.b.to(x.dtype))
        return _product(x, weight.weight, bias) + _product(_product(x, a, None), b, None)
    return _product(x, weight, bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    fits = x.ndim > 0 and weight.ndim == 2 and x.shape[-1] == weight.shape[1] and x.dtype == weight.dtype
    fits = fits and x.is_floating_point() and weight.shape[0] > 0 and weight.shape[1] > 0
    fits = fits and (bias is None or (bias.shape == weight.shape[:1] and bias.dtype == x.dtype))
    wanted = "x must be floating [..., D], weight [E, D] of the same dtype with D, E > 0, and bias [E] of it or None"
    require(fits, "ordered_linear", wanted, x, weight, *(() if bias is None else (bias,)))
    moving = {"weight": weight, "bias": bias}
    tracing = torch.compiler.is_compiling()
    wanted_for = tuple(name for name, part in moving.items() if part is not None and (tracing or part.requires_grad))
    out: torch.Tensor = _ordered_linear(x, weight, bias, wanted_for)
    return out


def _run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Collection[str]) -> torch.Tensor:
    del wanted
    out: torch.Tensor = _forward(x, weight, bias)
    return out


def _pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    del outputs
    x, weight, bias, wanted = inputs
    dy = cotangents[0].reshape(-1, weight.shape[0])
    found = linear_into_weights(dy, x.reshape(-1, x.shape[-1]), weight, bias, wanted)
    return linear_into_input(dy, weight).view(x.shape), found.get("weight"), found.get("bias"), None


_forward = implementation(
    "ordered_linear",
    "forward",
    "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference.forward,
    lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
)
_ordered_linear = custom_vjp(_run, _pull, keep_outputs=False)
