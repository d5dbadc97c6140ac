"""Laws of records, on arbitrary trees inside them and arbitrary sets of fields."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

from areno_fn import tree
from areno_fn.contracts.errors import DonatedError
from areno_fn.contracts.record import donate, field_names, record, replace, static
from areno_fn.testing import strategies
from areno_fn.testing.strategies import Node

nodes = st.builds(Node, first=strategies.trees(), second=st.none() | strategies.trees(), name=st.text(max_size=3))


@given(nodes)
def test_taking_apart_and_putting_together_is_the_identity(node: Node) -> None:
    leaves, structure = pytree.tree_flatten(node)
    again = pytree.tree_unflatten(leaves, structure)
    assert pytree.tree_structure(again) == structure
    assert all(a is b for a, b in zip(leaves, pytree.tree_leaves(again), strict=True))
    assert (again.second is None) == (node.second is None) and again.name == node.name


@given(nodes)
def test_paths_and_leaves_come_in_one_order(node: Node) -> None:
    with_paths, structure = pytree.tree_flatten_with_path(node)
    assert structure == pytree.tree_structure(node)
    assert all(a is b for (_, a), b in zip(with_paths, pytree.tree_leaves(node), strict=True))


@given(nodes, nodes)
def test_records_have_one_structure_exactly_when_their_parts_have(a: Node, b: Node) -> None:
    parts = a.name == b.name and (a.second is None) == (b.second is None)
    parts = parts and pytree.tree_structure((a.first, a.second)) == pytree.tree_structure((b.first, b.second))
    assert (pytree.tree_structure(a) == pytree.tree_structure(b)) == parts


@given(nodes, strategies.trees(), st.text(max_size=3))
def test_replacing_is_functional_and_the_last_write_wins(node: Node, value: Any, name: str) -> None:
    changed = replace(node, second=value, name=name)
    assert changed.second is value and changed.name == name and changed.first is node.first
    assert replace(replace(node, name="x"), name=name).name == name
    back = replace(changed, second=node.second, name=node.name)
    assert tree.equal(back, node)
    assert replace(node) is not node and tree.equal(replace(node), node)


@given(nodes)
def test_copies_equal_their_source_and_deep_ones_share_nothing(node: Node) -> None:
    shallow, deep = copy.copy(node), copy.deepcopy(node)
    assert tree.equal(shallow, node) and tree.equal(deep, node)
    assert all(a is b for a, b in zip(tree.leaves(shallow), tree.leaves(node), strict=True))
    assert all(a is not b for a, b in zip(tree.leaves(deep), tree.leaves(node), strict=True))


@given(nodes)
def test_a_donated_record_lives_on_in_its_successor_alone(node: Node) -> None:
    leaves, structure = pytree.tree_flatten(node)
    heir = donate(node)
    assert pytree.tree_structure(heir) == structure
    assert all(a is b for a, b in zip(leaves, pytree.tree_leaves(heir), strict=True))
    for name in field_names(heir):
        with pytest.raises(DonatedError, match=rf"Node\.{name} was read after this record was donated"):
            getattr(node, name)


@given(nodes)
def test_every_record_has_a_text_alive_or_donated(node: Node) -> None:
    text = repr(node)
    heir = donate(node)
    assert text.startswith("Node(") and repr(heir) == text
    assert repr(node).startswith("Node(<donated at ")


kinds = st.sampled_from(["leaf", "optional", "static", "factory"])
names = st.text("abcdefgh", min_size=1, max_size=4).filter(lambda n: n not in ("def", "if"))


@given(st.dictionaries(names, kinds, max_size=6))
def test_a_class_with_any_fields_makes_a_record(fields: dict[str, str]) -> None:
    annotations = {"leaf": torch.Tensor, "optional": torch.Tensor | None, "static": str, "factory": dict}
    defaults: dict[str, Any] = {
        name: {"optional": None, "static": static(default="s"), "factory": attrs.field(factory=dict)}[kind]
        for name, kind in fields.items()
        if kind != "leaf"
    }
    made = record(type("Made", (), {"__annotations__": {n: annotations[k] for n, k in fields.items()}, **defaults}))
    value = made(**{name: torch.zeros(2) for name, kind in fields.items() if kind == "leaf"})
    assert field_names(value) == tuple(fields)
    assert len(pytree.tree_leaves(value)) == sum(kind == "leaf" for kind in fields.values())
    assert tree.equal(pytree.tree_unflatten(*pytree.tree_flatten(value)), value)
