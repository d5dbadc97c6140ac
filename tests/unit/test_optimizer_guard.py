"""An optimizer of a user's own that writes in place is refused before a snapshot has followed it unnoticed (S2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from areno_fn import tree
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.optim import Transform
from areno_fn.steps.optimizers import optimizer_from, scale_by_adam

Update = Callable[[Any, Any, Any], tuple[Any, Any]]


def honest(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
    return tree.map(lambda g: -0.1 * g, updates), {"mu": tree.map(lambda m, g: m + g, state["mu"], updates)}


def into_parameters(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """As `torch.optim` does, and optimizers in the manner of optax that have `inplace=True`."""
    params["w"].sub_(updates["w"])
    return tree.map(torch.zeros_like, updates), state


def into_a_view(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
    torch._foreach_mul_([params["w"][1:]], 0.5)
    return tree.map(torch.zeros_like, updates), state


def into_moments(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
    state["mu"]["w"].add_(updates["w"])
    return updates, state


def start() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(3)}


def begun(update: Update, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    made = optimizer_from((lambda params: {"mu": tree.map(torch.zeros_like, params)}, update))
    params = tree.map(lambda x: x.to(dtype), start())
    return made, made.init(params), params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("update", "path"),
    [(into_parameters, "params.w"), (into_a_view, "params.w"), (into_moments, "state.mu.w")],
)
def test_S2_a_write_is_refused_with_its_path(update: Update, path: str, dtype: torch.dtype) -> None:
    made, state, params = begun(update, dtype)
    with pytest.raises(RecordError, match=rf"the update of an optimizer wrote to {path} in place; it must return"):
        made.apply(start(), state, params)


def test_an_honest_update_passes_and_so_does_one_in_inference_mode() -> None:
    made, state, params = begun(honest)
    moved, after, _ = made.apply(start(), state, params)
    assert torch.equal(moved["w"], torch.full((3,), 0.9)) and torch.equal(params["w"], torch.ones(3))
    made.apply(start(), after, moved)
    with torch.inference_mode():
        made, state, params = begun(honest)
        made.apply(start(), state, params)


def test_the_transforms_of_the_library_write_nothing() -> None:
    made = optimizer_from(scale_by_adam())
    state = made.init(start())
    made.apply(start(), state, start())
    assert isinstance(scale_by_adam(), Transform)
