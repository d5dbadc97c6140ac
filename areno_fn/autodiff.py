"""Derivatives of functions on trees: `value_and_grad`, `custom_vjp`, `remat`, and `donate`.

`torch.func.grad_and_value` keeps the backward graph alive and needs about twice the memory of autograd.
`torch.func.vjp` with `retain_graph=False, create_graph=False` does not, so everything here is built on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from areno_fn.contracts.record import donate

__all__ = ["custom_vjp", "donate", "remat", "value_and_grad"]


def value_and_grad(function: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., tuple[Any, Any]]:
    """The value of a scalar function and its gradient in the first argument.

    Args:
        function: `function(tree, *args, **kwargs)` returning a scalar tensor, or a pair of a scalar tensor
            and a tree of tensors when `has_aux`.
        has_aux: the function returns `(value, aux)`.

    Returns:
        A function returning `(value, gradient)` or `((value, aux), gradient)`. The gradient has the
        structure of the first argument; leaves that are not floating tensors have gradient 0.
    """

    def run(tree: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, spec = pytree.tree_flatten(tree)
        moving = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]

        def of_moving(*values: torch.Tensor) -> Any:
            full = list(leaves)
            for i, value in zip(moving, values, strict=True):
                full[i] = value
            return function(pytree.tree_unflatten(full, spec), *args, **kwargs)

        value, pull, *aux = torch.func.vjp(of_moving, *(leaves[i] for i in moving), has_aux=has_aux)
        if value.ndim:
            raise ValueError(f"value_and_grad needs a scalar, but the function returned shape {tuple(value.shape)}")
        pulled = pull(torch.ones_like(value), retain_graph=False, create_graph=False)
        gradient = [torch.zeros_like(x) if isinstance(x, torch.Tensor) else 0 for x in leaves] if len(moving) != len(leaves) else list(leaves)
        for i, g in zip(moving, pulled, strict=True):
            gradient[i] = g
        tree_gradient = pytree.tree_unflatten(gradient, spec)
        return ((value, aux[0]), tree_gradient) if has_aux else (value, tree_gradient)

    return run


def custom_vjp(
    forward: Callable[..., Any],
    backward: Callable[[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]],
) -> Callable[..., Any]:
    """A function with its own vector-Jacobian product, on both sides of which plain tensors arrive.

    The pair works under `torch.func`, plain autograd and `torch.compile`, and with real data pointers, so
    that kernels and collectives can be called in it. It is differentiable once.

    Args:
        forward: `forward(*tensors)` returning a tensor or a tuple of tensors. It must not write into its
            arguments.
        backward: `backward(cotangents, inputs, outputs)`, each a tuple of tensors; returns one cotangent
            per input, `None` where the input has none. It must not write into any of them.
    """

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(*flat: Any) -> Any:
            *tensors, counts = flat
            a, b = counts
            given = tuple(tensors)
            result = backward(given[:a], given[a : a + b], given[a + b :])
            # a Function cannot return None under torch.func: an absent cotangent travels as zeros
            return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(result, given[a : a + b], strict=True))

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            del ctx, inputs, output

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            raise RuntimeError("custom_vjp is differentiable once; write the backward of the backward as a second custom_vjp")

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            return forward(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            ctx.count = len(inputs)
            ctx.inexact = tuple(_is_inexact(x) for x in inputs)
            ctx.mark_non_differentiable(*(x for x in outputs if not _is_inexact(x)))
            ctx.save_for_backward(*inputs, *outputs)

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            result = Backward.apply(*cotangents, *ctx.saved_tensors, (len(cotangents), ctx.count))
            return tuple(g if inexact else None for g, inexact in zip(result, ctx.inexact, strict=True))

    def call(*tensors: torch.Tensor) -> Any:
        return Forward.apply(*tensors)

    return call


def remat(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its intermediate values recomputed in the backward pass instead of kept.

    The arguments and the result may be trees; tensors the function closes over get no gradient, so pass
    parameters as arguments. The same as `jax.checkpoint`.
    """

    def run(*args: Any) -> Any:
        leaves, spec = pytree.tree_flatten(args)
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        out_spec: list[Any] = []

        def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            full = list(leaves)
            for i, tensor in zip(where, tensors, strict=True):
                full[i] = tensor
            values, structure = pytree.tree_flatten(function(*pytree.tree_unflatten(full, spec)))
            out_spec[:] = [structure]
            return tuple(values)

        def recompute(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
            del outputs
            moving = [i for i, x in enumerate(inputs) if _is_inexact(x)]

            def of_moving(*values: torch.Tensor) -> Any:
                full = list(inputs)
                for i, value in zip(moving, values, strict=True):
                    full[i] = value
                return flat(*full)

            _, pull = torch.func.vjp(of_moving, *(inputs[i] for i in moving))
            result: list[Any] = [None] * len(inputs)
            for i, g in zip(moving, pull(cotangents, retain_graph=False, create_graph=False), strict=True):
                result[i] = g
            return tuple(result)

        out = custom_vjp(flat, recompute)(*(leaves[i] for i in where))
        return pytree.tree_unflatten(list(out), out_spec[0])

    return run


def _is_inexact(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
