"""Laws of averages, of what is derived from parameters, and of moves. Each fails on a wrong implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import EMA
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.steps.variants import averaging

ODD = torch.tensor([0x7FC00001, 0x7F800123, 0x7F800000, -0x80000000], dtype=torch.int64).to(torch.int32)
"""The bits of a quiet and a signalling NaN, of infinity and of minus 0."""


def averages(update: Callable[..., Any]) -> None:
    """s <- d s + (1 - d) p; 0 copies and 1 does nothing, whatever the numbers are; bfloat16 is averaged in float32."""
    old = {"w": torch.tensor([8.0, -4.0])}
    assert update(old, {"w": torch.tensor([0.0, 4.0])}, 0.75)["w"].tolist() == [6.0, -2.0]
    assert old["w"].tolist() == [8.0, -4.0]
    odd, plain = {"w": ODD.view(torch.float32)}, {"w": torch.arange(4.0)}
    copied = update(plain, odd, 0.0)
    assert tree.equal(copied, odd) and copied["w"].data_ptr() != odd["w"].data_ptr()
    assert tree.equal(update(odd, plain, 1.0), odd)
    slow = {"w": torch.ones(1)}
    for _ in range(3):
        slow = update(slow, {"w": torch.full((1,), 1.0078125, dtype=torch.bfloat16)}, 0.99)
    assert abs(slow["w"].item() - (1 + 0.0078125 * (1 - 0.99**3))) < 1e-6


def cadence(averaged: Callable[..., TrainState]) -> None:
    """Every second step, a copy up to the third, by hand."""
    spec = EMA(decay=0.5, schedule="warmup", every=2, start=3)
    state, found = averaging(_at(1.0)), []
    for value in (2.0, 3.0, 5.0, 21.0, 11.0, 13.0):
        state = averaged(replace(state, params=_at(value).params), spec)
        found.append(round(float(state.snapshots["ema"]["w"]), 4))
    # 3 / 10 + 21 * 9 / 10, then 2 / 11 of that and 13 * 9 / 11
    assert found == [1.0, 3.0, 3.0, 19.2, 19.2, 14.1273]


def _at(value: float) -> TrainState:
    return TrainState(
        params={"actor": {"w": torch.tensor([value])}},
        optim={},
        snapshots={},
        counters=Counters(),
        key=Key.of(0),
        cursor=Cursor(),
    )


def stands_alone(snapshot: Callable[[Any], Any]) -> None:
    """Nothing done to the source shows, and what is one tensor stays one."""
    shared = torch.arange(3.0)
    taken = snapshot({"embed": shared, "head": shared})
    shared.zero_()
    assert taken["embed"].tolist() == [0.0, 1.0, 2.0]
    assert taken["embed"] is taken["head"]


def never_stale(derived: Callable[[Callable[[Any], Any]], Any]) -> None:
    """FIELDCASES R3: made again for another tensor, for one in the memory of a dead one, and after a write; one at a time."""
    alive: list[Any] = []

    def make(source: Any) -> list[torch.Tensor]:
        assert held.is_held is False, "the last one is let go first"
        alive.append(source)
        return [leaf * 2 for leaf in tree.leaves(source)]

    held = derived(make)
    first, other = torch.ones(2), torch.ones(2)
    source = {"a": first, "b": [other]}
    assert held.of(source) is held.of({**source}) and len(alive) == 1
    other.add_(1.0)
    assert held.of(source)[1].tolist() == [4.0, 4.0]
    assert held.of({"a": first, "b": [torch.zeros(2)]})[1].tolist() == [0.0, 0.0]
    assert len(held.of({"a": first})) == 1
    assert held.of({"a": torch.zeros(2)})[0].tolist() == [0.0, 0.0]
    alive.clear()
    for number in range(8):
        assert held.of({"a": torch.full((2,), float(number))})[0].tolist() == [2.0 * number] * 2
        alive.clear()  # so that the memory of one is that of the next


def moves_exactly(offload: Callable[[Any], Any]) -> None:
    """Bits, strides and sharing stay; a write to the source does not show."""
    whole = torch.arange(12.0).reshape(3, 4)
    given = {"odd": ODD.view(torch.float32), "whole": whole, "tied": whole, "row": whole[1:2], "turned": whole.T}
    moved = offload(given)
    assert tree.equal(given, moved)
    assert moved["turned"].stride() == (1, 4) and moved["row"].shape == (1, 4)
    whole.zero_()
    assert moved["tied"][2, 3] == 11.0
    moved["whole"][1, 0] = 99.0
    assert moved["tied"][1, 0] == moved["row"][0, 0] == moved["turned"][0, 1] == 99.0
