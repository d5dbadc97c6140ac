"""Derivatives of functions on trees: `value_and_grad`, `custom_vjp`, `remat`, and `donate`.

`torch.func.grad_and_value` keeps the backward graph alive and needs about twice the memory of autograd.
`torch.func.vjp` with `retain_graph=False, create_graph=False` does not, so everything here is built on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
        if not moving:
            raise ValueError("value_and_grad needs a floating tensor in its first argument, but found none")

        def of_moving(*values: torch.Tensor) -> Any:
            full = list(leaves)
            for i, value in zip(moving, values, strict=True):
                full[i] = value
            return function(pytree.tree_unflatten(full, spec), *args, **kwargs)

        value, aux, pulled = _pull(of_moving, [leaves[i] for i in moving], has_aux)
        remaining = iter(pulled)
        gradient = [next(remaining) if _is_inexact(leaf) else _no_gradient(leaf) for leaf in leaves]
        tree_gradient = pytree.tree_unflatten(gradient, spec)
        return ((value, aux), tree_gradient) if has_aux else (value, tree_gradient)

    return run


def _no_gradient(leaf: Any) -> Any:
    return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else 0


def _pull(
    of_moving: Callable[..., Any], values: list[torch.Tensor], has_aux: bool
) -> tuple[torch.Tensor, Any, tuple[torch.Tensor, ...]]:
    """The value, the auxiliary output (or None) and the gradient in every argument."""
    if torch.compiler.is_compiling():
        # the graph frees what is dead, so keeping the backward alive costs nothing here; and Dynamo numbers the
        # nesting of transforms when it traces `remat`, which holds only while the outer transform is still open
        gradient, out = torch.func.grad_and_value(of_moving, argnums=tuple(range(len(values))), has_aux=has_aux)(
            *values
        )
        return (*out, gradient) if has_aux else (out, None, gradient)
    value, pull, *aux = torch.func.vjp(of_moving, *values, has_aux=has_aux)
    if value.ndim:
        raise ValueError(f"value_and_grad needs a scalar, but the function returned shape {tuple(value.shape)}")
    gradient = pull(torch.ones_like(value), retain_graph=False, create_graph=False)
    return value, aux[0] if has_aux else None, gradient


def custom_vjp(
    forward: Callable[..., Any],
    backward: Callable[[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]],
    *,
    constant_outputs: tuple[int, ...] = (),
    drop_inputs: tuple[int, ...] = (),
    keep_outputs: bool = True,
) -> Callable[..., Any]:
    """A function with its own vector-Jacobian product, on both sides of which plain tensors arrive.

    The pair works under `torch.func`, plain autograd and `torch.compile`, and with real data pointers, so
    that kernels and collectives can be called in it. It is differentiable once. Define it once, at module
    level: Dynamo refuses to build classes inside a compiled region.

    Args:
        forward: `forward(*args)` returning a tensor or a tuple of tensors. It must not write into its
            arguments. Arguments that are not tensors (an epsilon, a flag) are passed on as they are.
        backward: `backward(cotangents, inputs, outputs)`, each a tuple; returns one cotangent per input,
            `None` where the input has none. It must not write into any of them.
        constant_outputs: positions of floating outputs that carry no gradient, such as statistics saved
            for the backward; their cotangents are not to be read.
        drop_inputs: positions of tensors that `backward` does not read: it receives `None` there, and no
            memory is held for them.
        keep_outputs: whether `backward` reads the outputs; when not, it receives an empty tuple.
    """

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(plan: _Plan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return plan.pull(backward, tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            del ctx, inputs, output

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            raise RuntimeError(
                "custom_vjp is differentiable once; write the backward of the backward as a second custom_vjp"
            )

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return forward(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            tensors = [x for x in outputs if isinstance(x, torch.Tensor)]
            fixed = [x for i, x in enumerate(tensors) if i in constant_outputs or not _is_inexact(x)]
            if fixed:
                ctx.mark_non_differentiable(*fixed)
            ctx.static = tuple(None if isinstance(x, torch.Tensor) else x for x in inputs)
            ctx.where = tuple(i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and i not in drop_inputs)
            ctx.moving = tuple(i for i, x in enumerate(inputs) if _is_inexact(x))
            ctx.save_for_backward(*(inputs[i] for i in ctx.where), *(tensors if keep_outputs else ()))

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            moving = tuple(i for i in ctx.moving if ctx.needs_input_grad[i])
            plan = _Plan(len(cotangents), ctx.static, ctx.where, moving)
            given = (*cotangents, *ctx.saved_tensors)
            pulled = plan.pull(backward, given) if torch.compiler.is_compiling() else Backward.apply(plan, *given)
            result: list[Any] = [None] * len(ctx.static)
            for i, cotangent in zip(moving, pulled, strict=True):
                result[i] = cotangent
            return tuple(result)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            # Dynamo does not notice that an argument of torch.func.vjp requires a gradient, would then
            # differentiate `forward` itself, and refuses a tensor that is given twice; views have neither fault
            args = tuple(x.view_as(x) if isinstance(x, torch.Tensor) else x for x in args)
            if not torch.is_grad_enabled() or not any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
                return forward(*args)
        return Forward.apply(*args)

    return call


class _Plan(NamedTuple):
    """What a backward call needs besides its tensors: the cotangents, the kept inputs and the kept outputs in a row.

    Attributes:
        cotangents: how many of the tensors are cotangents.
        static: the arguments of the forward call, `None` where a tensor was.
        where: positions of the kept tensors among the arguments.
        moving: positions of the arguments whose cotangent is wanted.
    """

    cotangents: int
    static: tuple[Any, ...]
    where: tuple[int, ...]
    moving: tuple[int, ...]

    def pull(self, backward: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        first, after = self.cotangents, self.cotangents + len(self.where)
        inputs = list(self.static)
        for i, tensor in zip(self.where, tensors[first:after], strict=True):
            inputs[i] = tensor
        result = backward(tuple(tensors[:first]), tuple(inputs), tuple(tensors[after:]))
        if len(result) != len(inputs):
            raise ValueError(
                f"the backward of a custom_vjp must return {len(inputs)} cotangents, received {len(result)}"
            )
        # a Function cannot return None under torch.func: an absent cotangent travels as zeros
        return tuple(torch.zeros_like(inputs[i]) if result[i] is None else result[i] for i in self.moving)


def remat(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its intermediate values recomputed in the backward pass instead of kept.

    The arguments and the result may be trees; tensors the function closes over get no gradient, so pass
    parameters as arguments. The same as `jax.checkpoint`. Differentiable once.
    """

    def run(*args: Any) -> Any:
        leaves, spec = pytree.tree_flatten(args)

        def flat(*values: Any) -> tuple[Any, ...]:
            results, structure = pytree.tree_flatten(function(*pytree.tree_unflatten(values, spec)))
            # a Function may not both save and return an argument
            fresh = (x.view_as(x) if any(x is value for value in values) else x for x in results)
            return (*fresh, structure)

        *results, structure = _remat(flat, *leaves)
        return pytree.tree_unflatten(results, structure)

    return run


def _run_flat(flat: Callable[..., tuple[Any, ...]], *leaves: Any) -> tuple[Any, ...]:
    return flat(*leaves)


def _recompute(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    del outputs
    flat, *leaves = inputs
    moving = [i for i, x in enumerate(leaves) if _is_inexact(x)]
    answered: list[int] = []

    def of_moving(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        full = list(leaves)
        for i, value in zip(moving, values, strict=True):
            full[i] = value
        *results, _ = flat(*full)
        answered[:] = [i for i, x in enumerate(results) if _is_inexact(x)]
        return tuple(results[i] for i in answered)

    pull = torch.func.vjp(of_moving, *(leaves[i] for i in moving))[1]
    pulled = pull(tuple(cotangents[i] for i in answered), retain_graph=False, create_graph=False)
    result: list[Any] = [None] * len(inputs)
    for i, cotangent in zip(moving, pulled, strict=True):
        result[i + 1] = cotangent
    return tuple(result)


_remat = custom_vjp(_run_flat, _recompute, keep_outputs=False)


def _is_inexact(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
