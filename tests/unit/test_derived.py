"""What is derived from parameters: made when they change, and only then, and never two at a time."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.record import donate, record
from areno_fn.engine.derived import Derived, Seal


@record
class Weights:
    w: torch.Tensor
    bias: torch.Tensor | None = None


def params() -> dict[str, Any]:
    return {"actor": [torch.arange(3.0), torch.ones(2)], "base": Weights(w=torch.zeros(2))}


def counted() -> tuple[Derived[list[torch.Tensor]], list[int]]:
    made: list[int] = []

    def make(source: Any) -> list[torch.Tensor]:
        made.append(1)
        return [leaf * 2 for leaf in tree.leaves(source)]

    return Derived(make), made


def test_it_is_made_once_for_the_same_tensors() -> None:
    derived, made = counted()
    source = params()
    first = derived.of(source)
    assert derived.of(source) is first
    assert derived.of({**source}) is first, "another dict of the same tensors is the same source"
    assert derived.of({**source, "base": donate(source["base"])}) is first, "and so is a record handed over"
    assert len(made) == 1


def test_R3_it_is_made_again_when_a_leaf_is_another_tensor_or_has_been_written_to() -> None:
    derived, made = counted()
    source = params()
    derived.of(source)
    equal = {**source, "actor": [source["actor"][0].clone(), source["actor"][1]]}
    derived.of(equal)
    assert len(made) == 2, "equal numbers in another tensor may be those of the next step"
    equal["actor"][1].add_(1.0)
    assert torch.equal(derived.of(equal)[1], torch.full((2,), 4.0)) and len(made) == 3
    swapped = {**equal, "actor": [equal["actor"][1], equal["actor"][0]]}
    assert torch.equal(derived.of(swapped)[0], torch.full((2,), 4.0)) and len(made) == 4
    derived.of({**swapped, "more": torch.ones(1)})
    derived.of({**swapped, "base": Weights(w=swapped["base"].w, bias=torch.ones(1))})
    assert len(made) == 6


def test_R3_a_tensor_in_the_memory_of_a_dead_one_is_another() -> None:
    derived, made = counted()
    for number in range(20):
        source = {"w": torch.full((4,), float(number))}
        assert torch.equal(derived.of(source)[0], torch.full((4,), 2.0 * number))
        del source
    assert len(made) == 20


def test_at_most_one_is_held_and_nothing_of_its_source() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def make(source: Any) -> torch.Tensor:
        assert not [one for one in alive if one() is not None], "the last one is gone before the next is made"
        made = source["w"] * 2
        alive.append(weakref.ref(made))
        return made

    derived: Derived[torch.Tensor] = Derived(make)
    first, second = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    derived.of(first)
    derived.of(second)
    source = weakref.ref(second["w"])
    del second
    assert source() is None and derived.is_held and alive[1]() is not None
    derived.clear()
    assert not derived.is_held and alive[1]() is None


def test_leaves_that_are_no_tensors_are_compared() -> None:
    seal = Seal({"w": 1, "name": "a"})
    assert seal.fits({"w": 1, "name": "a"})
    assert not seal.fits({"w": 1.0, "name": "a"}) and not seal.fits({"w": 1, "name": "b"}) and not seal.fits({"w": 1})
    assert not seal.fits({"w": torch.ones(()), "name": "a"})
