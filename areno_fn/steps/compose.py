"""Composition: stages into an objective, an objective into a gradient, a gradient into a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.actions import Metrics, Sums
from areno_fn.contracts.calls import checked, received
from areno_fn.contracts.errors import JoinError, RecordError, SpecError
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.record import donate as donated
from areno_fn.contracts.record import replace
from areno_fn.contracts.state import TrainState
from areno_fn.steps.capture import Graphs, captured
from areno_fn.steps.donation import Alone
from areno_fn.steps.joins import Ends, Stage, ends, fits, join, show, stage_name
from areno_fn.steps.objectives.separable import is_entropic, is_separable
from areno_fn.steps.reduce import add_sums, finish, reduce_sums
from areno_fn.steps.scaling import divided, fitting

__all__ = [
    "Objective",
    "Pipeline",
    "Reduce",
    "View",
    "accumulate",
    "add_sums",
    "alone",
    "finish",
    "pipeline",
    "reduce_sums",
    "train_step",
]

Objective = Callable[[Any, Any], Sums]
"""`(params, batch) -> Sums`: numerator and denominator of a loss, never a mean."""

Reduce = Callable[[Any, Sums], tuple[Any, Sums]]
"""Adds the undivided gradient and the sums of all ranks (peaks are maxima); every rank receives the result."""

View = Callable[[Mapping[str, Any]], Any]
"""`params by role -> ` what the policy takes: one role as it is, or several put together."""


class Pipeline:
    """Stages run one after the other; made by `pipeline`. Its own ends are annotated, so that it is a stage too."""

    def __init__(self, stages: tuple[Stage, ...], described: tuple[Ends, ...]) -> None:
        self.stages = stages
        self._described = described
        self._whole = _together(stages)
        names = ", ".join(one.name for one in described)
        self.__name__ = self.__qualname__ = f"pipeline({names})"
        kinds = dict(zip(("params", "batch"), described[0].takes, strict=True))
        parameter = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, parameter, annotation=kind) for name, kind in kinds.items()],
            return_annotation=described[-1].returns,
        )
        self.__annotations__ = {**kinds, "return": described[-1].returns}

    def __call__(self, params: Any, batch: Any) -> Any:
        """Runs the stages on parameters and a batch."""
        if self._whole is not None:
            return self._whole(params, batch)
        first, *rest = self.stages
        value = first(params, batch)
        for stage in rest:
            value = stage(value)
        return value

    def __repr__(self) -> str:
        return "pipeline(\n" + "".join(f"  {one},\n" for one in self._described) + ")"


def _together(stages: tuple[Stage, ...]) -> Callable[[Any, Any], Any] | None:
    """Both stages as one function, where the first offers it and the second is a separable loss."""
    offer = getattr(stages[0], "with_loss", None)
    if offer is None or len(stages) != 2 or not is_separable(stages[1]):
        return None
    made: Callable[[Any, Any], Any] = offer(stages[1])
    return made


def pipeline(*stages: Stage) -> Pipeline:
    """Joins stages into one function of parameters and a batch.

    The first stage takes `(params, batch)`, every later one the record that the stage before it returned.
    Whether the ends meet is decided here, from the annotations of the stages: an input that is a union
    accepts its members, and a class accepts its subclasses.

        objective = pipeline(score(policy, sampling), cross_entropy())

    Scoring and a separable loss (`areno_fn.steps.objectives.separable`) are run as one, which makes logits once.

    Raises:
        JoinError: two stages do not meet, a stage cannot be called with what it gets, or an annotation is
            missing; the sentence names the stages and the types.
    """
    if not stages:
        raise JoinError(
            "pipeline() was given no stage; the first takes (params, batch), for example score(policy, sampling)"
        )
    described = [ends(stages[0], arguments=2)]
    for stage in stages[1:]:
        before = f"{described[-1].name} returns {show(described[-1].returns)}"
        described.append(ends(stage, arguments=1, before=before))
        join(described[-2], described[-1])
        _require_entropies(stages[0], stage)
    return Pipeline(stages, tuple(described))


def _require_entropies(scoring: Stage, stage: Stage) -> None:
    """A loss with an entropy bonus would train without it where entropies are statistics."""
    if is_entropic(stage) and not is_entropic(scoring):
        raise JoinError(
            f"{stage_name(stage)} has a gradient in the entropies, but those of {stage_name(scoring)} carry none; "
            f"write act(policy, sampling, entropic=True)"
        )


def alone(gradient: Any, sums: Sums) -> tuple[Any, Sums]:
    """The `Reduce` of a single rank: there is nothing to add."""
    return gradient, sums


def alike(params: Any, frozen: Any) -> Any:
    """The view of an objective that takes the parameters themselves."""
    del frozen
    return params


@checked
def accumulate(
    objective: Objective, *, reduce: Reduce = alone, view: Callable[[Any, Any], Any] = alike
) -> Callable[..., tuple[Any, Sums]]:
    """The gradient of an objective over several micro-batches, exact under any split of the decisions.

    It is the gradient of (sum of totals) / (sum of weights): totals are differentiated one micro-batch at a
    time, so that one graph is alive at a time, their gradients are added in float32 (float64 for float64
    parameters), and the sum is divided once, after all micro-batches and ranks. With a summed weight of 0
    the gradient is exactly 0.

    A single micro-batch of a single rank needs no sum: the division is part of what is differentiated, and the
    gradient stays in the dtype of the parameters, without a copy. In float16, which has no room for small cotangents, it
    is divided afterwards all the same.

    Args:
        objective: `(params, batch) -> Sums`, annotated so.
        reduce: adds gradients and sums over ranks.
        view: `(params, frozen) -> ` what the objective takes in the place of `params`.

    Returns:
        A function of parameters, a non-empty sequence of micro-batches and, for the view, anything frozen. It
        returns the gradient, a tree like the parameters, and the undivided `Sums` of everything. What is frozen
        is not differentiated.

    Raises:
        JoinError: the objective does not return `Sums`.
        RecordError: from the function, which was given no list or tuple of micro-batches, or an empty one.
    """
    _check_objective(objective)
    evaluate = _evaluating(objective, view)
    derive = value_and_grad(lambda *args: _with_total(evaluate(*args)), has_aux=True)
    derive_mean = value_and_grad(lambda *args: _with_mean(evaluate(*args)), has_aux=True)

    def gradient_of(params: Any, batches: Sequence[Any], frozen: Any = None) -> tuple[Any, Sums]:
        _check_batches(batches)
        if len(batches) == 1 and reduce is alone and not _narrow(params):
            (_, sums), gradient = derive_mean(params, batches[0], frozen)
            return gradient, sums
        (_, sums), slope = derive(params, batches[0], frozen)
        gradient = _owned(tree.leaves(slope))
        for batch in batches[1:]:
            del slope  # what has been added must not lie beside the next graph
            (_, part), slope = derive(params, batch, frozen)
            torch._foreach_add_(_floating(gradient), _floating(tree.leaves(slope)))
            sums = add_sums(sums, part)
        del slope
        reduced, sums = reduce(tree.unflatten(params, gradient), sums)
        return _divided(reduced, sums.weight, owned=reduce is alone), sums

    return gradient_of


@checked
def train_step(
    objective: Objective,
    optimizer: Optimizer,
    *,
    role: str = "actor",
    view: View | None = None,
    reduce: Reduce = alone,
    prefix: str = "train",
    donate: bool = False,
    capture: bool | Graphs = False,
) -> Callable[[TrainState, Sequence[Any]], tuple[TrainState, Metrics]]:
    """One update of one role: accumulate, move, report.

    The step is a function of its arguments, which stay as they are. With `donate` the state is handed over instead: it is
    unreadable afterwards, and what the role had in memory is what the new state has, bit for bit what it would be without,
    so that parameters, masters and moments are there once.

        step = train_step(objective, optimizer, donate=True)
        state, metrics = step(state, batch)         # not: after, metrics = step(state, batch)

    Args:
        objective: `(params, batch) -> Sums`.
        optimizer: moves the role's parameters.
        role: key of `TrainState.params` and `TrainState.optim`; nothing else of them is replaced, and nothing else is
            differentiated.
        view: from `TrainState.params` to what the objective takes; the role's own parameters when omitted.
        reduce: adds gradients and sums over ranks.
        prefix: family of the metric names.
        donate: the step may write to the role's parameters and moments; nothing else may hold them, as a view, another
            role or a snapshot. A loss that raises leaves the state as it was, unless it is captured.
        capture: on a GPU, the second step of every shape of micro-batches is captured as a CUDA graph, which is replayed from
            then on (`areno_fn.steps.capture`). It needs `donate`. Steps that are given one `Graphs` share its memory.

    Returns:
        `(state, micro-batches) -> (state, metrics)`. `Counters.optimizer_step` advances by 1. The metrics
        are the loss, the objective's statistics, and what the optimizer reports.

    Raises:
        JoinError: the objective does not return `Sums`.
        SpecError: `capture` without `donate`.
        RecordError: the optimizer is none, as `adamw(spec, steps)` makes one; or from the step, where the state is none, has no
            such role, or no moments of it, or where something else in it shares the memory of what is donated.
        DonatedError: from reading a state that was donated.
    """
    graphs = capture if isinstance(capture, Graphs) else Graphs() if capture else None
    if graphs is not None and not donate:
        raise SpecError("train_step: a captured step writes to its state, so write capture=True, donate=True")

    def seen(params: Any, frozen: Mapping[str, Any]) -> Any:
        return params if view is None else view({**frozen, role: params})

    gradient_of = accumulate(objective, reduce=reduce, view=seen)
    apply = optimizer.apply_in_place if donate and optimizer.apply_in_place else optimizer.apply

    def slope(moved: tuple[Any, Any], frozen: Mapping[str, Any], batches: Sequence[Any]) -> tuple[Any, Sums]:
        return gradient_of(moved[0], batches, {**frozen, role: moved[0]})

    def move(moved: tuple[Any, Any], frozen: Mapping[str, Any], batches: Sequence[Any]) -> tuple[tuple[Any, Any], Any]:
        gradient, sums = slope(moved, frozen, batches)
        params, optim, stats = apply(gradient, moved[1], moved[0])
        return (params, optim), (sums, stats)

    moving = None if graphs is None else captured(move, graphs)
    require_alone = Alone()

    def step(state: TrainState, batches: Sequence[Any]) -> tuple[TrainState, Metrics]:
        if not isinstance(state, TrainState):
            raise RecordError(f"a step takes a TrainState and micro-batches, received {received(state)} for the state")
        _check_role(state, role)
        _check_batches(batches)
        if donate:
            require_alone(state, role)
        frozen = {name: own for name, own in state.params.items() if name != role}
        own = state.params[role], state.optim[role]
        if moving is None:
            gradient, sums = slope(own, frozen, batches)
            # only now: what fails before anything is written leaves the state to its owner
            state = donated(state) if donate else state
            params, optim, stats = apply(gradient, own[1], own[0])
        else:
            state = donated(state)
            (params, optim), (sums, stats) = moving(own, frozen, batches)
        moved = replace(
            state,
            params={**state.params, role: params},
            optim={**state.optim, role: optim},
            counters=state.counters.advance_optimizer(),
        )
        return moved, finish(sums, stats, prefix=prefix)

    return step


def _check_batches(batches: Sequence[Any]) -> None:
    if isinstance(batches, str) or not isinstance(batches, Sequence):
        raise RecordError(
            f"a step takes a tuple or a list of micro-batches, received {type(batches).__name__}; write (batch,)"
        )
    if not batches:
        raise RecordError("accumulate was given no micro-batch; a step needs at least one")


def _check_role(state: TrainState, role: str) -> None:
    if role not in state.params:
        raise RecordError(
            f"the step moves role {role!r}, which is not in state.params; roles are {', '.join(state.params) or 'none'}"
        )
    if role not in state.optim:
        raise RecordError(
            f"the step moves role {role!r}, which has no moments in state.optim; put optimizer.init(params) there"
        )


def _check_objective(objective: Objective) -> None:
    returns = ends(objective, arguments=2).returns
    if not fits(returns, Sums):
        raise JoinError(
            f"{stage_name(objective)} returns {show(returns)}, but accumulate takes an objective that returns Sums; "
            f"end the pipeline with an objective such as cross_entropy() or clipped()"
        )


def _evaluating(objective: Objective, view: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Sums]:
    def run(params: Any, batch: Any, frozen: Any) -> Sums:
        sums = objective(view(params, frozen), batch)
        if not isinstance(sums, Sums):
            raise JoinError(
                f"{stage_name(objective)} is declared to return Sums, but returned {show(type(sums))}; "
                f"end the loss with total, weight = aggregate(...) and return Sums(total=total, weight=weight, ...)"
            )
        _require_slope(objective, sums)
        return sums

    return run


def _require_slope(objective: Objective, sums: Sums) -> None:
    """A loss of detached numbers would move nothing. One of no decision may have no graph, and then nothing is to be moved."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return
    if torch.is_grad_enabled() and not sums.total.requires_grad and bool(sums.weight != 0):
        raise JoinError(
            f"the total of {stage_name(objective)} has no gradient, so a step would move nothing by it; make it of what the "
            f"stage before gives, without detach(), item() or torch.no_grad()"
        )


def _with_total(sums: Sums) -> tuple[torch.Tensor, Sums]:
    return sums.total, sums


def _with_mean(sums: Sums) -> tuple[torch.Tensor, Sums]:
    return sums.total / _divisor(sums.weight.detach()), sums


def _divisor(weight: torch.Tensor) -> torch.Tensor:
    """The weight, or infinity for 0, which makes the gradient of nothing exactly 0 without another pass over it."""
    return torch.where(weight == 0, torch.inf, weight)


def _narrow(params: Any) -> bool:
    """Whether a leaf is in float16, in which a cotangent over the number of tokens may vanish."""
    return any(leaf.dtype == torch.float16 for leaf in _floating(tree.leaves(params)))


def _owned(leaves: Sequence[Any]) -> list[Any]:
    """Copies to add into, in float32 at least: a gradient may share storage with another leaf's or with an argument."""
    slopes = _floating(leaves)
    wider = [torch.promote_types(slope.dtype, torch.float32) for slope in slopes]
    copies = [torch.empty(x.shape, dtype=dtype, device=x.device) for x, dtype in zip(slopes, wider, strict=True)]
    torch._foreach_copy_(copies, slopes)
    remaining = iter(copies)
    return [next(remaining) if _floating([leaf]) else leaf for leaf in leaves]


def _floating(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _divided(gradient: Any, weight: torch.Tensor, owned: bool) -> Any:
    """The gradient over the weight, in the memory of what is divided where nobody else knows that."""
    leaves = tree.leaves(gradient)
    divisor = _divisor(weight)
    if owned:
        torch._foreach_div_(_floating(leaves), fitting(divisor, _floating(leaves)))
        return gradient
    means = iter(divided(_floating(leaves), divisor))
    return tree.unflatten(gradient, [next(means) if _floating([leaf]) else leaf for leaf in leaves])
