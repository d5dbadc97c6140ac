"""The algebra of layouts: laws over random compositions of every primitive, and what it refuses, in its own words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from areno_fn.contracts.errors import LayoutError
from areno_fn.contracts.layout import (
    Iso,
    TensorSpec,
    concat,
    deinterleave,
    describe,
    identity,
    interleave,
    pad,
    product,
    rename,
    replicate,
    reshape,
    split,
    stack,
    tie,
    transpose,
    unstack,
    views_of,
)
from areno_fn.contracts.placement import Replicated, Split, Vocabulary, grouped, pairs, place, rank_name, shard
from areno_fn.testing import laws, strategies
from areno_fn.testing.elements import member, random_bits, require_same
from areno_fn.testing.layouts import RANKS

EXAMPLES = settings.get_profile("layouts")
COMPOSITIONS = settings(EXAMPLES, max_examples=4 * EXAMPLES.max_examples)
A = TensorSpec((2, 3))
B = TensorSpec((4, 3))


# -------------------------------------------------------------------------------------------------- laws


@COMPOSITIONS
@given(strategies.isos())
def test_any_composition_is_a_bijection_that_moves_elements(iso: Iso) -> None:
    laws.iso_roundtrip(iso, exact_sources=False)


@EXAMPLES
@given(strategies.isos(), strategies.keys())
def test_composing_and_inverting_agree(iso: Iso, key: Any) -> None:
    """(f >> g) inverse is g inverse >> f inverse, and f >> f inverse is the identity."""
    (given_side,) = member(iso, random_bits(iso.source, key))
    require_same((iso >> iso.inverse)(given_side), given_side, "there and back as one layout")
    then = product(rename(name, f"{name}.then", spec) for name, spec in iso.target.items())
    one, two = (iso >> then).inverse, then.inverse >> iso.inverse
    made = (iso >> then)(given_side)
    require_same(one(made), two(made), "the inverse of a composition")


@EXAMPLES
@given(strategies.isos(), strategies.keys())
def test_beside_each_other_layouts_do_not_meet(iso: Iso, key: Any) -> None:
    renamed = product(rename(f"other.{name}", name, spec) for name, spec in iso.source.items())
    other = renamed >> iso >> product(rename(name, f"other.{name}", spec) for name, spec in iso.target.items())
    both = iso | other
    (left,) = member(iso, random_bits(iso.source, key))
    (right,) = member(other, random_bits(other.source, key.fold(1)))
    require_same(both({**left, **right}), {**iso(left), **other(right)}, "side by side")
    assert len(both.parts) == len(iso.parts) + len(other.parts)


@EXAMPLES
@given(strategies.isos())
def test_a_description_names_every_part(iso: Iso) -> None:
    assert len(describe(iso).splitlines()) == len(iso.parts)


@EXAMPLES
@given(strategies.isos().flatmap(lambda iso: strategies.state_dicts(iso).map(lambda state: (iso, state))))
def test_a_state_dict_is_what_its_layout_takes(drawn: tuple[Iso, dict[str, torch.Tensor]]) -> None:
    iso, state = drawn
    assert list(state) == list(iso.source)
    assert all(iso.source[name].admits(tensor) for name, tensor in state.items())
    require_same(iso.inverse(iso(state)), state, "there and back")


@settings(EXAMPLES, max_examples=max(5, EXAMPLES.max_examples // 3))
@given(strategies.isos())
def test_any_composition_goes_through_files(iso: Iso) -> None:
    """Not only layouts of families: whatever is a layout can be loaded and saved."""
    laws.checkpoint_roundtrip(iso)


# --------------------------------------------------------------------------------------- worked by hand


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def test_interleaved_rows_are_dealt_per_head() -> None:
    """Two heads of two rows, each followed by its gate: q0 q1 g0 g1 | q2 q3 g2 g3."""
    spec = TensorSpec((4, 1))
    iso = deinterleave("q_proj", {"q": spec, "gate": spec}, blocks=2)
    made = iso({"q_proj": numbers(8, 1)})
    assert made["q"].flatten().tolist() == [0, 1, 4, 5]
    assert made["gate"].flatten().tolist() == [2, 3, 6, 7]
    assert interleave({"q": spec, "gate": spec}, "q_proj", blocks=2)(made)["q_proj"].flatten().tolist() == list(
        range(8)
    )


def test_interleaved_parts_may_differ_in_size() -> None:
    parts = {"a": TensorSpec((2,)), "b": TensorSpec((4,))}
    made = interleave(parts, "ab", blocks=2)({"a": torch.tensor([0, 1]), "b": torch.tensor([10, 11, 12, 13])})
    assert made["ab"].tolist() == [0, 10, 11, 1, 12, 13]


def test_the_moves_of_one_tensor() -> None:
    given_side = {"a": numbers(2, 3)}
    assert transpose("a", "b", A)(given_side)["b"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert reshape("a", "b", A, (3, 2))(given_side)["b"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert split("a", {"b": TensorSpec((2, 1)), "c": TensorSpec((2, 2))}, 1)(given_side)["c"].tolist() == [
        [1, 2],
        [4, 5],
    ]
    assert unstack("a", ["b", "c"], TensorSpec((3,)))(given_side)["c"].tolist() == [3, 4, 5]
    assert pad("a", "b", A, 3)(given_side)["b"].tolist() == [[0, 1, 2], [3, 4, 5], [0, 0, 0]]
    assert transpose("a", "b", TensorSpec(()), ())({"a": torch.tensor(7)})["b"].item() == 7


def test_ranks_hold_their_part_of_every_block() -> None:
    """Two query heads, one key and one value head of two rows: rank 1 of 2 holds q_1 and the same k and v as rank 0."""
    held = shard("qkv", TensorSpec((8,)), grouped(2, 1, 2), 2)({"qkv": numbers(8)})
    assert held[rank_name(0, "qkv")].tolist() == [0, 1, 4, 5, 6, 7]
    assert held[rank_name(1, "qkv")].tolist() == [2, 3, 4, 5, 6, 7]
    held = shard("gate_up", TensorSpec((4,)), pairs(2), 2)({"gate_up": numbers(4)})
    assert [held[rank_name(rank, "gate_up")].tolist() for rank in range(2)] == [[0, 2], [1, 3]]
    held = shard("embed", TensorSpec((3, 1)), Vocabulary(), 2)({"embed": numbers(3, 1) + 1})
    assert [held[rank_name(rank, "embed")].flatten().tolist() for rank in range(2)] == [[1, 2], [3, 0]]
    held = shard("down", TensorSpec((1, 4)), Split(1), 2)({"down": numbers(1, 4)})
    assert held[rank_name(1, "down")].tolist() == [[2, 3]]


def test_views_that_cover_an_element_twice_and_another_never_are_no_cover() -> None:
    """Two merged ranks, copied again: as many views as elements, but both of the first."""
    merged = replicate("x", ["0/x", "1/x"], A).inverse >> replicate("x", ["a", "b"], A)
    assert views_of(merged.parts[0].inverse, {"a": numbers(2, 3), "b": numbers(2, 3)}) is None
    joined = concat({"a": A, "b": A}, "c")
    leaves = {"c": numbers(4, 3)}
    views = views_of(joined.parts[0].inverse, leaves)
    assert views is not None and views["b"].data_ptr() == leaves["c"][2:].data_ptr()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "agreed"), [(4, 2, (1, 2, 4)), (8, 4, (1, 2, 4, 8)), (6, 1, (1, 2, 3)), (2, 3, (1,))]
)
def test_placements_are_plain_slices(heads: int, kv_heads: int, agreed: tuple[int, ...]) -> None:
    head_dim, width = 2, 24
    leaves = {
        "embed": TensorSpec((9, 4)),
        "qkv": TensorSpec(((heads + 2 * kv_heads) * head_dim, 4)),
        "gate_up": TensorSpec((2 * width, 4)),
        "down": TensorSpec((4, width)),
        "norm": TensorSpec((4,)),
        "experts": TensorSpec((3, width, 4)),
    }
    placements = {
        "embed": Vocabulary(),
        "qkv": grouped(heads, kv_heads, head_dim),
        "gate_up": pairs(width),
        "down": Split(1),
        "norm": Replicated(),
        "experts": Split(1),
    }
    assert laws.placements_agree(leaves, placements) == agreed


# ----------------------------------------------------------------------------------------------- refusals

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "shapes that do not meet": (
        lambda: rename("a", "b", A) >> transpose("b", "c", B),
        "two layouts do not meet: the first gives 'b' as [2, 3], the second takes it as [4, 3]",
    ),
    "overlap": (
        lambda: concat({"q": A, "k": A}, "qk") | rename("k", "k_too", A),
        "the source key 'k' is claimed by two parts of a layout",
    ),
    "overlap of targets": (
        lambda: rename("a", "x", A) | transpose("b", "x", A),
        "the target key 'x' is claimed by two parts of a layout",
    ),
    "a gap": (
        lambda: (rename("a", "b", A) | rename("c", "d", A)) >> rename("b", "e", A),
        "two layouts do not meet: the first gives 'd', which the second does not take",
    ),
    "an unclaimed tensor": (
        lambda: rename("a", "b", A)({"a": numbers(2, 3), "c": numbers(2, 3)}),
        "the tensors given do not fit the layout: 'c' is not declared",
    ),
    "a missing tensor": (
        lambda: identity({"a": A, "b": B})({"a": numbers(2, 3)}),
        "the tensors given do not fit the layout: 'b' is missing",
    ),
    "an order that is none": (
        lambda: transpose("a", "b", A, (0, 0)),
        "transpose of 'a': (0, 0) is not an order of the dimensions of [2, 3]",
    ),
    "another number of elements": (lambda: reshape("a", "b", A, (2, 2)), "'a' hold 6 elements, but 'b' hold 4"),
    "blocks that do not divide": (
        lambda: interleave({"q": A, "g": A}, "qg", 4),
        "interleave into 'qg': dimension 0 of 'q', which is [2, 3], cannot be cut into 4 blocks",
    ),
    "no blocks": (
        lambda: interleave({"q": A}, "qg", 0),
        "interleave into 'qg' needs a number of blocks of at least 1, received 0",
    ),
    "parts of another rank along a later dimension": (
        lambda: concat({"a": A, "b": TensorSpec((2,))}, "c", 1),
        "concat into 'c' along dimension 1: 'b' is [2], which does not continue 'a', which is [2, 3]",
    ),
    "padding to less": (
        lambda: pad("a", "b", A, 1),
        "pad of 'a' to 1 along dimension 0: it is [2, 3], which is larger",
    ),
    "padding of no dimension": (lambda: pad("a", "b", A, 3, 2), "pad of 'a': there is no dimension 2 among 2"),
    "padding that is not zero": (
        lambda: pad("a", "b", A, 3).inverse({"b": numbers(3, 3)}),
        "'b' is padded from 2 to 3 along dimension 0, but the padding is not zero; "
        "what stands there must take no part in training",
    ),
    "padding of a negative zero": (
        lambda: pad("a", "b", TensorSpec((1,)), 2).inverse({"b": torch.tensor([1.0, -0.0])}),
        "'b' is padded from 1 to 2 along dimension 0, but the padding is not zero",
    ),
    "copies that differ": (
        lambda: replicate("a", ["0/a", "1/a"], A).inverse({"0/a": numbers(2, 3), "1/a": numbers(2, 3) + 1}),
        "'0/a' and '1/a' are tied, both are the leaf 'a', but their values differ",
    ),
    "a stack of another name twice": (lambda: unstack("a", ["b", "b"], A), "stack into 'a' names 'b' twice"),
    "rows that cannot be dealt": (
        lambda: shard("down", TensorSpec((4, 6)), Split(1), 4),
        "'down' is [4, 6]: its dimension 1 cannot be dealt evenly to 4 ranks",
    ),
    "heads that cannot be dealt": (
        lambda: shard("qkv", TensorSpec((20,)), grouped(6, 2, 2), 4),
        "'qkv': 6 heads cannot be dealt to 4 ranks; their number must be a multiple of the ranks",
    ),
    "kv heads that cannot be dealt": (
        lambda: shard("qkv", TensorSpec((20,)), grouped(4, 3, 2), 2),
        "'qkv': 3 heads cannot be dealt to 2 ranks; one number must divide the other",
    ),
    "blocks that are not the leaf": (
        lambda: shard("gate_up", TensorSpec((6, 2)), pairs(4), 1),
        "'gate_up' is [6, 2]: its dimension 0 is not 4 + 4, which its placement says",
    ),
    "no ranks": (lambda: shard("a", A, Replicated(), 0), "'a' cannot be dealt to 0 ranks; at least 1 is needed"),
    "no such dimension to deal": (
        lambda: shard("norm", TensorSpec((2,)), Split(1), 2),
        "'norm' is [2], which has no dimension 1 to deal to ranks",
    ),
    "every leaf that cannot be dealt, at once": (
        lambda: place({"a": A, "b": TensorSpec((3, 5)), "c": A}, {"a": Split(1), "b": Split(1), "d": Split(0)}, 2),
        "the leaves cannot be dealt to 2 ranks: 'c' has no placement; a placement is given for 'd', which is no leaf; "
        "'a' is [2, 3]: its dimension 1 cannot be dealt evenly to 2 ranks; "
        "'b' is [3, 5]: its dimension 1 cannot be dealt evenly to 2 ranks",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    build, words = REFUSED[name]
    with pytest.raises(LayoutError, match=re.escape(words)) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_shapes_are_refused_before_a_byte_is_there() -> None:
    """Building a layout of a size that no memory holds costs nothing, right or wrong."""
    huge = TensorSpec((1 << 20, 1 << 20))
    wide = product(rename(f"{e}", f"expert.{e}", huge) for e in range(8)) >> stack(
        [f"expert.{e}" for e in range(8)], "experts", huge
    )
    assert wide.target["experts"].numel == 1 << 43
    with pytest.raises(LayoutError, match="do not meet"):
        wide >> transpose("experts", "moved", TensorSpec((8, 1 << 20, 1 << 21)), (0, 2, 1))


def test_one_rank_holds_all_of_a_tied_leaf() -> None:
    iso = tie("embed", ("a", "b"), A) >> shard("embed", A, Vocabulary(), 1)
    assert list(iso.target) == [rank_name(0, "embed")]
    assert RANKS[0] == 1
