"""Laws of `areno_fn.tree` on arbitrary trees of records, dicts, lists and tuples."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno_fn import tree
from areno_fn.contracts.record import record, static
from areno_fn.testing import strategies


@record
class Pair:
    left: Any
    right: Any = None
    name: str = static(default="pair")


class Named(NamedTuple):
    first: Any
    rest: list[Any]


def test_map_of_the_identity_is_the_identity_and_maps_compose() -> None:
    @given(strategies.trees())
    def law(value: Any) -> None:
        assert tree.equal(tree.map(lambda x: x, value), value)
        twice = tree.map(lambda x: -x, tree.map(lambda x: x + 1, value))
        assert tree.equal(twice, tree.map(lambda x: -(x + 1), value))

    law()


@given(strategies.trees())
def test_paths_leaves_and_unflatten_agree(value: Any) -> None:
    with_paths = tree.leaves_with_path(value)
    assert all(a is b for (_, a), b in zip(with_paths, tree.leaves(value), strict=True))
    assert len({path for path, _ in with_paths}) == len(with_paths)
    assert tree.equal(tree.unflatten(value, tree.leaves(value)), value)
    seen: list[str] = []
    mapped = tree.map_with_path(lambda path, leaf: (seen.append(path), leaf)[1], value)
    assert seen == [path for path, _ in with_paths] and tree.equal(mapped, value)


@given(strategies.trees())
def test_nodes_hold_every_leaf_in_the_order_of_leaves_and_their_containers(value: Any) -> None:
    for whole in (value, OrderedDict(a=value), Pair(left=value, name="other"), Named(value, [value])):
        nodes = tree.nodes(whole)
        assert nodes[0] is whole
        found = [node for node in nodes if isinstance(node, torch.Tensor)]
        assert all(a is b for a, b in zip(found, tree.leaves(whole), strict=True))


def test_nodes_tell_records_of_one_leaf_apart_by_what_is_static() -> None:
    leaf = torch.ones(2)
    one, other = Pair(left=leaf, name="one"), Pair(left=leaf, name="other")
    assert tree.nodes(one)[1] is tree.nodes(other)[1] and tree.nodes(one)[0] is not tree.nodes(other)[0]


@given(strategies.trees(), st.integers(0, 3))
def test_combine_inverts_partition(value: Any, modulus: int) -> None:
    chosen, rest = tree.partition(lambda x: x.numel() % (modulus + 1) == 0, value)
    assert tree.equal(tree.combine(chosen, rest), value)
    assert tree.equal(tree.combine(rest, chosen), value)
    kept = sum(leaf is not tree.ABSENT for leaf in [*tree.leaves(chosen), *tree.leaves(rest)])
    assert kept == len(tree.leaves(value))


@given(strategies.trees(min_leaves=1), st.data())
def test_a_change_of_one_bit_is_found_at_its_path(value: Any, data: st.DataObject) -> None:
    items = [(path, leaf) for path, leaf in tree.leaves_with_path(value) if leaf.numel()]
    if not items:
        return
    path, leaf = data.draw(st.sampled_from(items))
    changed = leaf.clone()
    raw = changed.reshape(-1).view(torch.uint8)
    place = data.draw(st.integers(0, raw.numel() - 1))
    raw[place] ^= 1
    other = tree.map_with_path(lambda p, x: changed if p == path else x, value)
    assert tree.equal(value, value) and not tree.equal(value, other)
    assert tree.first_difference(value, other) == f"{path or '<root>'}: 1 of {leaf.numel()} elements differ"


@given(strategies.trees(min_leaves=1))
def test_at_sets_one_place_and_leaves_the_others(value: Any) -> None:
    whole = {"x": (value, Pair(left=value, right=torch.zeros(1)))}
    new = torch.full((3,), 7.0)
    changed = tree.at(whole, lambda w: w["x"][1].right).set(new)
    assert changed["x"][1].right is new and whole["x"][1].right.shape == (1,)
    assert tree.equal(changed["x"][0], value) and tree.equal(changed["x"][1].left, value)
    back = tree.at(changed, lambda w: w["x"][1].right).set(whole["x"][1].right)
    assert tree.equal(back, whole)


def test_at_applies_a_function_to_subtrees_and_negative_items() -> None:
    value = {"layers": [torch.zeros(2), torch.ones(2)]}
    changed = tree.at(value, lambda v: v["layers"][-1]).apply(lambda x: x + 1)
    assert torch.equal(changed["layers"][1], torch.full((2,), 2.0))
    assert torch.equal(value["layers"][1], torch.ones(2))
    assert tree.at(value, lambda v: v).apply(lambda v: 3) == 3


def test_at_names_a_field_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="at: Pair has no field 'middle'"):
        tree.at(Pair(left=torch.zeros(1)), lambda p: p.middle).set(1)


@pytest.mark.parametrize("nan", [math.nan, -math.nan])
def test_nan_equals_the_same_nan_and_no_other(nan: float) -> None:
    value = torch.tensor([1.0, nan])
    assert tree.equal({"a": value}, {"a": value.clone()})
    other = value.clone()
    other.view(torch.int32)[1] ^= 1
    assert torch.isnan(other[1])
    assert tree.first_difference({"a": value}, {"a": other}) == "a: 1 of 2 elements differ"


def test_the_sign_of_zero_is_a_difference() -> None:
    assert tree.first_difference(torch.tensor([0.0]), torch.tensor([-0.0])) == "<root>: 1 of 1 elements differ"
    assert tree.first_difference([0.0], [-0.0]) == "0: 0.0 against -0.0"


def test_numbers_that_are_not_tensors_compare_by_type_and_value() -> None:
    assert tree.equal([math.nan, 1, "a"], [math.nan, 1, "a"])
    assert tree.first_difference([1], [True]) == "0: 1 against True"
    assert tree.first_difference([1], [1.0]) == "0: 1 against 1.0"
    assert tree.first_difference([torch.tensor(1)], [1]) == "0: tensor(1) against 1"


def test_shape_and_dtype_are_differences() -> None:
    assert tree.first_difference(torch.zeros(2), torch.zeros(1, 2)) == "<root>: shape (2,) against (1, 2)"
    assert (
        tree.first_difference(torch.zeros(2), torch.zeros(2).long())
        == "<root>: dtype torch.float32 against torch.int64"
    )
    assert tree.equal(torch.zeros(0), torch.zeros(0)) and not tree.equal(torch.zeros(0), torch.zeros(0, 2))


def test_a_layout_in_memory_is_no_difference() -> None:
    value = torch.arange(6.0).reshape(2, 3)
    assert tree.equal(value.t(), value.t().contiguous())


def test_containers_are_compared_with_the_path_where_they_differ() -> None:
    one, two = torch.zeros(1), torch.zeros(1)
    assert tree.first_difference({"a": [one]}, {"a": [one, two]}) == "a.1: only in the second tree"
    assert tree.first_difference({"a": one, "b": two}, {"a": one}) == "b: only in the first tree"
    assert tree.first_difference({"a": [one]}, {"a": (one,)}) == "a: list against tuple"
    assert tree.first_difference({"a": one}, {"a": [one]}) == "a: Tensor against list"
    assert (
        tree.first_difference([Pair(left=one)], [Pair(left=one, name="other")])
        == "0: the static fields of two Pair differ"
    )
    assert tree.first_difference([Pair(left=one)], [Pair(left=one, right=two)]) == "0.right: only in the second tree"


def test_the_order_of_a_dict_is_no_difference_and_map_pairs_by_key() -> None:
    first = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
    second = {"b": torch.tensor(20.0), "a": torch.tensor(10.0)}
    total = tree.map(torch.add, first, second)
    assert total["a"] == 11 and total["b"] == 22
    assert tree.equal(first, dict(reversed(first.items())))
    assert tree.first_difference(first, second) == "a: 1 of 1 elements differ"


def test_map_over_trees_that_differ_names_the_path() -> None:
    with pytest.raises(ValueError, match=r"trees differ in structure at b\.1: only in the first tree"):
        tree.map(torch.add, {"b": [torch.zeros(1), torch.zeros(1)]}, {"b": [torch.zeros(1)]})


def test_a_bare_tensor_is_a_tree() -> None:
    assert tree.leaves_with_path(torch.zeros(1))[0][0] == ""
    assert tree.equal(tree.map(lambda x: x + 1, torch.zeros(1)), torch.ones(1))
