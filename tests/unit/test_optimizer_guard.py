"""An optimizer of a user's own is held to what optimizers keep: shapes, structures, pairs, and no write in place (S2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from areno_fn import tree
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.optim import Transform
from areno_fn.steps.optimizers import optimizer_from, scale_by_adam, with_master

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


TWO = {"w": torch.ones(3, 4), "n": torch.full((4,), 2.0)}


def applied(update: Update, params: Any = TWO, state: Any = ()) -> Any:
    made = optimizer_from((lambda params: state, update))
    return made.apply(tree.map(torch.ones_like, params), made.init(params), params)[0]


@pytest.mark.parametrize(
    ("update", "sentence"),
    [
        (
            lambda u, s, p: (tree.map(torch.sum, u), s),
            r"^an optimizer's update of w is f32\[\], and the parameter f32\[3,4\]",
        ),
        (lambda u, s, p: (tree.map(lambda g: g[None], u), s), r"^an optimizer's update of w is f32\[1,3,4\], and the"),
        (lambda u, s, p: (tree.map(lambda g: -0.1, u), s), r"^an optimizer's update of w is -0\.1, and the parameter"),
        (lambda u, s, p: ({**u, "n": None}, s), r"^an optimizer's update of n is None, and the parameter f32\[4\]"),
        (
            lambda u, s, p: ({"w": u["w"]}, s),
            "^an optimizer's update is not made like the parameters: .* at n: only in",
        ),
        (
            lambda u, s, p: ({**u, "b": u["n"]}, s),
            "^an optimizer's update is not made like the parameters: .* at b: only",
        ),
        (
            lambda u, s, p: (list(u.values()), s),
            "^an optimizer's update is not made like the parameters: .*dict against list",
        ),
        (lambda u, s, p: u, r"^the update of an optimizer returned a dict; it must return \(updates, state\)$"),
        (lambda u, s, p: None, r"^the update of an optimizer returned a NoneType; it must return \(updates, state\)$"),
        (lambda u, s, p: (u, s, {}), r"^the update of an optimizer returned a tuple of 3; it must return"),
    ],
)
def test_an_update_is_a_pair_of_updates_like_the_parameters_and_a_state(update: Update, sentence: str) -> None:
    with pytest.raises(RecordError, match=sentence):
        applied(update)
    with pytest.raises(RecordError, match=sentence):
        made = with_master(Transform(init=lambda params: (), update=update))
        made.apply(TWO, made.init(TWO), TWO)


def test_updates_find_their_parameters_by_path_in_any_order() -> None:
    """As gradients do; by place, the leaf of one would have been added to another of the same shape."""
    params = {"a": torch.zeros(2), "b": torch.zeros(2)}
    moved = applied(lambda u, s, p: ({"b": 2 * u["b"], "a": u["a"]}, s), params)
    assert moved["a"].tolist() == [1.0, 1.0] and moved["b"].tolist() == [2.0, 2.0]
    made = optimizer_from((lambda params: (), lambda u, s, p: (u, s)))
    moved, _, _ = made.apply({"b": torch.full((2,), 2.0), "a": torch.ones(2)}, made.init(params), params)
    assert moved["a"].tolist() == [1.0, 1.0] and moved["b"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("wide", [torch.float64, torch.bfloat16, torch.int64])
def test_masters_keep_their_dtype_whatever_updates_have(wide: torch.dtype) -> None:
    made = optimizer_from((lambda params: (), lambda u, s, p: (tree.map(lambda g: g.to(wide), u), s)))
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    moved, state, _ = made.apply(start(), made.init(params), params)
    assert moved["w"].dtype == torch.bfloat16 and moved["w"].tolist() == [2.0, 2.0, 2.0]
    assert state.master["w"].dtype == torch.float32


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        ({"mu": torch.ones(2), "nu": torch.ones(2)}, "at nu: only in the second tree; a state keeps structure"),
        ({"mu": torch.ones(3)}, r"at mu: 'f32\[2\]' against 'f32\[3\]'; a state keeps structure, shapes and dtypes"),
        ({"mu": torch.ones(2).double()}, r"at mu: 'f32\[2\]' against 'f64\[2\]'; a state keeps"),
        ({"mu": None}, r"at mu: 'f32\[2\]' against 'NoneType'; a state keeps"),
        ({}, "at mu: only in the first tree; a state keeps structure"),
    ],
)
def test_a_state_keeps_structure_shapes_and_dtypes(after: Any, sentence: str) -> None:
    with pytest.raises(RecordError, match=f"^the update of an optimizer changed its state {sentence}"):
        applied(lambda u, s, p: (u, after), state={"mu": torch.ones(2)})


def test_what_the_functions_take_is_seen_before_they_are_called() -> None:
    sentence = r"of an optimizer of one's own takes \({}\), but this one takes \({}\)$"
    for update, takes in ((lambda u, s: (u, s), "u, s"), (lambda u, s, p, more: (u, s), "u, s, p, more")):
        with pytest.raises(SpecError, match="^the update " + sentence.format("updates, state, params", takes)):
            optimizer_from((lambda params: (), update))
    with pytest.raises(SpecError, match="^the init " + sentence.format("params", "")):
        optimizer_from((lambda: (), honest))
    optimizer_from((lambda *anything: (), lambda u, s, p=None, **more: (u, s)))
    optimizer_from((dict, honest))


def test_a_gradient_of_another_shape_is_no_gradient() -> None:
    made = optimizer_from((lambda params: (), lambda u, s, p: (u, s)))
    for gradient, sentence in (
        ({"w": torch.ones(()), "n": torch.ones(4)}, r"^the gradient of w is f32\[\], and the parameter f32\[3,4\]"),
        ({"w": torch.ones(3, 4)}, "^the gradient is not made like the parameters: .* at n: only in the first tree"),
    ):
        with pytest.raises(RecordError, match=sentence):
            made.apply(gradient, made.init(TWO), TWO)
