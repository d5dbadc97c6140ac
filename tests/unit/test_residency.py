"""Moves of records to the host and back: exact, with what they share, and without touching what is moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno_fn import tree
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import record, static
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.engine.residency import Residency, offload, onload
from areno_fn.steps.recipes import REFERENCE
from areno_fn.steps.variants import AVERAGE

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


@record
class Layer:
    w: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = static(default=2.0)


def leaf(dtype: torch.dtype, kind: str, seed: int) -> torch.Tensor:
    """Any bits, NaNs with payloads among them, under different strides."""
    source = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        whole = torch.randint(2, (6, 8), generator=source).bool()
    else:
        size = torch.empty(0, dtype=dtype).itemsize
        whole = torch.randint(256, (6, 8 * size), generator=source, dtype=torch.uint8).view(dtype)
    return {
        "plain": whole,
        "transposed": whole.T,
        "sliced": whole[1:5:2, 3:],
        "expanded": whole[:1].expand(3, 8),
        "scalar": whole[2, 3],
        "empty": whole[:0],
    }[kind]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.sampled_from(["plain", "transposed", "sliced", "expanded", "scalar", "empty"]),
            st.integers(0, 99),
        ),
        max_size=4,
    )
)
def test_there_and_back_every_bit_and_stride_is_the_same(kinds: list[Any]) -> None:
    given_tree = {"leaves": [leaf(*kind) for kind in kinds], "count": 3, "record": Layer(w=torch.ones(2, 2).T)}
    before = tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, given_tree)
    away = offload(given_tree)
    back = onload(away, "cpu")
    for made in (away, back, given_tree):
        assert tree.equal(before, made)
    for one, other in zip(tree.leaves(given_tree), tree.leaves(back), strict=True):
        if isinstance(one, torch.Tensor):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())


def test_what_is_moved_is_a_copy_that_later_writes_do_not_reach() -> None:
    given_tree = {"w": torch.arange(4.0), "b": torch.ones(2)}
    away = offload(given_tree)
    given_tree["w"].zero_()
    assert away["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    back = onload(away, "cpu")
    away["w"].zero_()
    assert back["w"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_leaves_that_share_memory_share_it_afterwards_and_others_do_not() -> None:
    fused = torch.arange(12.0).reshape(3, 4)
    shared = {"embed": fused, "head": fused, "first": fused[:1], "across": fused.T, "other": fused.clone()}
    moved = onload(offload(shared), "cpu")
    moved["embed"][0, 0] = 99.0
    assert moved["head"][0, 0] == moved["first"][0, 0] == moved["across"][0, 0] == 99.0
    assert moved["other"][0, 0] == 0.0 and fused[0, 0] == 0.0


def test_meta_tensors_stay_and_sparse_ones_are_refused() -> None:
    meta = torch.empty(2, device="meta")
    assert offload({"w": meta})["w"] is meta
    with pytest.raises(RecordError, match=r"a\.w is .* of layout torch.sparse_coo; only dense tensors can be moved"):
        offload({"a": {"w": torch.ones(2, 2).to_sparse()}})


def state(snapshots: dict[str, Any]) -> TrainState:
    return TrainState(
        params={"actor": {"w": torch.ones(2)}},
        optim={},
        snapshots=snapshots,
        counters=Counters(),
        key=Key.of(0),
        cursor=Cursor(),
    )


def test_a_held_reference_is_fetched_once_until_it_is_released_or_renewed() -> None:
    residency = Residency(["reference"], torch.device("cpu"), hold=True)
    shelf = residency.shelves[REFERENCE]
    kept = shelf.put({"w": torch.arange(3.0)})
    first = shelf.take(kept)
    assert tree.equal(first, kept) and shelf.take(kept) is first
    residency.release()
    assert shelf.take(kept) is not first
    assert torch.equal(shelf.take(shelf.put({"w": torch.ones(3)}))["w"], torch.ones(3))


def test_without_hold_nothing_of_a_fetched_snapshot_is_kept() -> None:
    shelf = Residency(["reference"], torch.device("cpu")).shelves[REFERENCE]
    kept = shelf.put({"w": torch.arange(3.0)})
    assert shelf.take(kept) is not shelf.take(kept)


def test_only_what_is_away_is_expected_on_the_host_and_settled_there() -> None:
    residency = Residency(["reference"], torch.device("cpu"))
    blank = residency.expected(
        state({REFERENCE: {"w": torch.empty(2, device="meta")}, AVERAGE: {"w": torch.empty(2, device="meta")}})
    )
    assert blank.snapshots[REFERENCE]["w"].device.type == "cpu" and blank.snapshots[AVERAGE]["w"].is_meta
    loaded = state({REFERENCE: {"w": torch.ones(2)}, AVERAGE: {"w": torch.zeros(2)}})
    settled = residency.settled(loaded)
    assert tree.equal(settled, loaded) and settled.snapshots[AVERAGE]["w"] is loaded.snapshots[AVERAGE]["w"]
    assert settled.snapshots[REFERENCE]["w"] is not loaded.snapshots[REFERENCE]["w"]
