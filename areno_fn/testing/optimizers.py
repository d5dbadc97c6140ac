"""The law of an optimizer that torch has too: step by step, both leave the same parameters.

from areno_fn.testing import laws

laws.optimizer_matches(adamw(spec, 100), lambda named: torch.optim.AdamW(named.values(), lr=1e-3), params)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from areno_fn import random, tree
from areno_fn.contracts.key import Key
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.record import shown
from areno_fn.testing.sizes import is_floating, require_some

TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Largest deviation by dtype, relative to the largest parameter; float32's is about 80 roundings of 2^-23."""


def optimizer_matches(
    ours: Optimizer,
    torch_factory: Callable[[dict[str, torch.nn.Parameter]], torch.optim.Optimizer],
    params: Any,
    *,
    steps: int = 100,
    feedback: float = 1.0,
    tolerances: Mapping[torch.dtype, float] = TOLERANCES,
    before_step: Callable[[list[torch.nn.Parameter], torch.optim.Optimizer, int], None] | None = None,
) -> dict[torch.dtype, float]:
    """An optimizer and one of torch's, on the same gradients, keep the same parameters, in every dtype.

    The gradient of a step is `feedback` times the parameters, each side's own, and a normal number for every element: with
    feedback above 0 a deviation changes the gradients that follow, and is not forgotten.

    Args:
        ours: the optimizer.
        torch_factory: makes torch's from parameters by path, so that it can form groups.
        params: a tree of floating tensors to start from, cast to each dtype.
        steps: how many.
        feedback: how the gradient depends on the parameters.
        tolerances: by dtype that is tried, the largest deviation relative to the largest parameter.
        before_step: `(parameters, optimizer, step)`, called with torch's gradients in place before its 1-based step: to
            clip, or to set a rate.

    Returns:
        By dtype, the largest deviation that was found, relative in the same way.

    Raises:
        AssertionError: names dtype, step and path of the first deviation that is too large, or a parameter that never moves.
        ValueError: there is no step, no dtype, no parameter, or one that is not a floating-point tensor with elements.
    """
    require_some(steps, f"steps={steps} makes none", "give optimizer_matches 1 at least")
    require_some(len(tolerances), "tolerances name no dtype", "give optimizer_matches one at least")
    named = tree.leaves_with_path(params)
    require_some(len(named), "params hold nothing", "give optimizer_matches a tree of tensors")
    for path, leaf in named:
        if not is_floating(leaf) or not leaf.numel():
            raise ValueError(
                f"{path or 'params'} is {shown(leaf)}, of which nothing can be compared; every leaf must be a floating-point "
                f"tensor that is not empty"
            )
    return {
        dtype: _largest(ours, torch_factory, params, dtype, steps, feedback, limit, before_step)
        for dtype, limit in tolerances.items()
    }


def _largest(
    ours: Optimizer,
    torch_factory: Callable[[dict[str, torch.nn.Parameter]], torch.optim.Optimizer],
    params: Any,
    dtype: torch.dtype,
    steps: int,
    feedback: float,
    limit: float,
    before_step: Callable[[list[torch.nn.Parameter], torch.optim.Optimizer, int], None] | None,
) -> float:
    start = mine = tree.map(lambda leaf: leaf.to(dtype), params)
    theirs = {path: torch.nn.Parameter(leaf.clone()) for path, leaf in tree.leaves_with_path(start)}
    optimizer, state, worst = torch_factory(theirs), ours.init(mine), 0.0
    for step in range(1, steps + 1):
        mine, state, _ = ours.apply(_gradients(mine, step, feedback), state, mine)
        for path, gradient in _gradients({p: leaf.detach() for p, leaf in theirs.items()}, step, feedback).items():
            theirs[path].grad = gradient
        if before_step is not None:
            before_step(list(theirs.values()), optimizer, step)
        optimizer.step()
        size = max(float(leaf.detach().abs().max()) for leaf in theirs.values())
        for path, leaf in tree.leaves_with_path(mine):
            error = float((leaf - theirs[path].detach()).abs().max()) / size
            worst = max(worst, error)
            if leaf.dtype != dtype or not error <= limit:
                raise AssertionError(
                    f"in {dtype}, {path} deviates from torch's by {error:.3g} of the largest parameter after step {step}, "
                    f"which is more than {limit:.3g}"
                )
    for (path, before), after in zip(tree.leaves_with_path(start), tree.leaves(mine), strict=True):
        if torch.equal(before, after):
            raise AssertionError(f"{path} is what it was after {steps} steps; nothing was compared")
    return worst


def _gradients(params: Any, step: int, feedback: float) -> Any:
    """By path and place, so that both sides draw the same numbers."""

    def gradient(path: str, leaf: torch.Tensor) -> torch.Tensor:
        places = torch.arange(leaf.numel(), device=leaf.device)
        noise = random.normal(Key.of(step).fold(path), places, dtype=leaf.dtype).reshape(leaf.shape)
        return feedback * leaf + noise

    return tree.map_with_path(gradient, params)
