"""Derivatives of functions on trees: `value_and_grad`, `custom_vjp`, `remat`, and `donate`.

`torch.func.grad_and_value` keeps the backward graph alive and needs about twice the memory of autograd. Autograd itself and
`torch.func.vjp` with `retain_graph=False, create_graph=False` do not, so everything here is built on them: on autograd
where no transform of torch.func is under way, because it costs the host less, and on `vjp` elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from areno_fn.contracts.calls import received
from areno_fn.contracts.errors import RecordError
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
    _require_function("value_and_grad", function)

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


def _require_function(who: str, function: object) -> None:
    if not callable(function):
        raise RecordError(f"{who} takes a function, received {received(function)}")


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
    if torch._C._functorch.peek_interpreter_stack() is None:
        return _pull_alone(of_moving, values, has_aux)
    value, pull, *aux = torch.func.vjp(of_moving, *values, has_aux=has_aux)
    _require_scalar(value)
    gradient = pull(torch.ones_like(value), retain_graph=False, create_graph=False)
    return value, aux[0] if has_aux else None, gradient


def _pull_alone(
    of_moving: Callable[..., Any], values: list[torch.Tensor], has_aux: bool
) -> tuple[torch.Tensor, Any, tuple[torch.Tensor, ...]]:
    """`_pull` where no transform of torch.func is under way: by plain autograd, which costs the host a third of the time."""
    with torch.enable_grad():
        given = [x.detach().requires_grad_() for x in values]
        result = of_moving(*given)
        value, aux = result if has_aux else (result, None)
        _require_scalar(value)
        if not value.requires_grad:
            gradient = tuple(torch.zeros_like(x) for x in values)
        else:
            gradient = torch.autograd.grad(value, given, materialize_grads=True)
    return value.detach(), pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, aux), gradient


def _require_scalar(value: torch.Tensor) -> None:
    if value.ndim:
        raise ValueError(f"value_and_grad needs a scalar, but the function returned shape {tuple(value.shape)}")


def custom_vjp(
    forward: Callable[..., Any],
    backward: Callable[[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]],
    *,
    constant_outputs: tuple[int, ...] = (),
    drop_inputs: tuple[int, ...] = (),
    drop_outputs: tuple[int, ...] = (),
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
            for the backward; their cotangents are not to be read, and are None outside of a traced graph.
        drop_inputs: positions of tensors that `backward` does not read: it receives `None` there, and no
            memory is held for them.
        drop_outputs: the same for outputs.
        keep_outputs: whether `backward` reads the outputs; when not, it receives an empty tuple.
    """
    for given in (forward, backward):
        _require_function("custom_vjp", given)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(plan: _Plan, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
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
            ctx.results = tuple(i for i in range(len(tensors)) if i not in drop_outputs) if keep_outputs else ()
            ctx.made = len(tensors) if keep_outputs else 0
            ctx.save_for_backward(*(inputs[i] for i in ctx.where), *(tensors[i] for i in ctx.results))
            ctx.likes = ()
            if constant_outputs and not torch.compiler.is_compiling():
                # otherwise autograd fills zeros as large as everything that is kept
                ctx.set_materialize_grads(False)
                ctx.likes = tuple(
                    None if i in constant_outputs else (x.shape, x.dtype, x.device) for i, x in enumerate(tensors)
                )

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            if ctx.likes:
                cotangents = tuple(_filled(*pair) for pair in zip(cotangents, ctx.likes, strict=True))
            moving = tuple(i for i in ctx.moving if ctx.needs_input_grad[i])
            plan = _Plan(len(cotangents), ctx.static, ctx.where, moving, ctx.results, ctx.made)
            given = (*cotangents, *ctx.saved_tensors)
            direct = torch.compiler.is_compiling() or _are_plain(given)
            pulled = plan.pull(backward, given) if direct else Backward.apply(plan, *given)
            result: list[Any] = [None] * len(ctx.static)
            for i, cotangent in zip(moving, pulled, strict=True):
                result[i] = cotangent
            return tuple(result)

    # autograd asks for it in every call, and finding it takes longer than the rest of the call
    setattr(Forward.forward, "__signature__", inspect.signature(Forward.forward))

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            # Dynamo does not notice that an argument of torch.func.vjp requires a gradient, would then
            # differentiate `forward` itself, and refuses a tensor that is given twice; views have neither fault
            args = tuple(x.view_as(x) if isinstance(x, torch.Tensor) else x for x in args)
            if not torch.is_grad_enabled() or not any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
                return forward(*args)
        return Forward.apply(*args)

    return call


def _are_plain(given: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether tensors come from autograd alone, which keeps no graph of this backward: then nothing has to unwrap them.

    What torch.func has wrapped stays so after its transform is over, when a `pull` is called.
    """
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    alone = torch._C._functorch.peek_interpreter_stack() is None and not torch.is_grad_enabled()
    return alone and not any(x is not None and wrapped(x) for x in given)


def _filled(cotangent: torch.Tensor | None, like: tuple[Any, ...] | None) -> torch.Tensor | None:
    """A cotangent, zeros where an output that has a gradient did not get one."""
    if cotangent is not None or like is None:
        return cotangent
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device)


class _Plan(NamedTuple):
    """What a backward call needs besides its tensors: the cotangents, the kept inputs and the kept outputs in a row.

    Attributes:
        cotangents: how many of the tensors are cotangents.
        static: the arguments of the forward call, `None` where a tensor was.
        where: positions of the kept tensors among the arguments.
        moving: positions of the arguments whose cotangent is wanted.
        results: positions of the kept tensors among the outputs.
        made: how many outputs the backward is shown.
    """

    cotangents: int
    static: tuple[Any, ...]
    where: tuple[int, ...]
    moving: tuple[int, ...]
    results: tuple[int, ...]
    made: int

    def pull(self, backward: Callable[..., Any], tensors: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
        first, after = self.cotangents, self.cotangents + len(self.where)
        inputs = list(self.static)
        for i, tensor in zip(self.where, tensors[first:after], strict=True):
            inputs[i] = tensor
        outputs: list[torch.Tensor | None] = [None] * self.made
        for i, tensor in zip(self.results, tensors[after:], strict=True):
            outputs[i] = tensor
        result = backward(tuple(tensors[:first]), tuple(inputs), tuple(outputs))
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
    _require_function("remat", function)

    def run(*args: Any) -> Any:
        leaves, spec = pytree.tree_flatten(args)

        def flat(*values: Any) -> tuple[Any, ...]:
            results, structure = pytree.tree_flatten(function(*pytree.tree_unflatten(values, spec)))
            # a Function may not both save and return an argument
            shared = (isinstance(x, torch.Tensor) and any(x is value for value in values) for x in results)
            fresh = (x.view_as(x) if again else x for x, again in zip(results, shared, strict=True))
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
