"""Trees of tensors: the few functions every other part is written with.

A tree is any nesting of dicts, lists, tuples and records (`areno_fn.contracts.record`); everything else is
a leaf. `None` fields of a record are structure. Paths read like code: `layers.0.qkv`, `params.actor.embed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils._pytree as pytree

from areno_fn.contracts.record import children_of, field_names, is_record
from areno_fn.contracts.treepath import dotted, named_leaves

T = TypeVar("T")

Tree = Any
"""A nesting of containers and records with tensors at the leaves."""


def map(function: Callable[..., Any], tree: T, *rest: Any) -> T:
    """Applies `function` to corresponding leaves of trees of one structure.

    Raises:
        ValueError: the structures differ; the message names the first path that does.
    """
    for other in rest:
        difference = _structure_difference(tree, other)
        if difference is not None:
            raise ValueError(f"trees differ in structure at {difference}")
    return pytree.tree_map(function, tree, *rest)


def leaves(tree: Tree) -> list[Any]:
    """The leaves, in a fixed order."""
    return pytree.tree_leaves(tree)


def nodes(tree: Tree) -> list[Any]:
    """Every container and every leaf, parents first, in a fixed order.

    Two trees whose nodes are the same objects are one tree, static fields included. This takes a fraction of the time
    that a comparison of structures takes.
    """
    found: list[Any] = []
    _visit(tree, found)
    return found


def _visit(tree: Tree, found: list[Any]) -> None:
    found.append(tree)
    kind = type(tree)
    if kind is torch.Tensor:
        return
    children: Iterable[Any] = ()
    if kind is dict:
        children = tree.values()
    elif kind is tuple or kind is list:
        children = tree
    elif is_record(tree):
        children = children_of(tree)
    elif not pytree.tree_is_leaf(tree):
        children = pytree.tree_leaves(tree, is_leaf=lambda x: x is not tree)
    for child in children:
        _visit(child, found)


def leaves_with_path(tree: Tree) -> list[tuple[str, Any]]:
    """The leaves with their dotted paths, in the order of `leaves`."""
    return named_leaves(tree)


def map_with_path(function: Callable[[str, Any], Any], tree: T, *, is_leaf: Callable[[Any], bool] | None = None) -> T:
    """Like `map` over one tree, passing the dotted path as the first argument.

    Nodes for which `is_leaf` is true are passed whole.
    """
    items, spec = pytree.tree_flatten_with_path(tree, is_leaf)
    return pytree.tree_unflatten([function(dotted(path), leaf) for path, leaf in items], spec)


def unflatten(like: T, values: Iterable[Any]) -> T:
    """A tree of the structure of `like` with other leaves."""
    return pytree.tree_unflatten(list(values), pytree.tree_structure(like))


class _Absent:
    """Stands in a partitioned tree where the leaf went to the other half."""

    def __repr__(self) -> str:
        return "<absent>"


ABSENT = _Absent()


def partition(predicate: Callable[[Any], bool], tree: T) -> tuple[T, T]:
    """Splits a tree in two of the same structure: leaves that satisfy `predicate`, and the others.

    Where a leaf went to the other tree, `ABSENT` stands. `combine` is the inverse.
    """
    return map(lambda x: x if predicate(x) else ABSENT, tree), map(lambda x: ABSENT if predicate(x) else x, tree)


def combine(first: T, second: Any) -> T:
    """Joins the halves that `partition` made."""
    return map(lambda a, b: b if a is ABSENT else a, first, second)


class At:
    """`at(tree, where).set(value)`: a functional update of one place in a tree of records."""

    def __init__(self, tree: Any, where: Callable[[Any], Any]) -> None:
        self._tree = tree
        self._where = where

    def set(self, value: Any) -> Any:
        """A copy of the tree in which the place that `where` points at holds `value`."""
        return self.apply(lambda _: value)

    def apply(self, function: Callable[[Any], Any]) -> Any:
        """A copy of the tree in which the place that `where` points at is mapped by `function`."""
        steps: list[tuple[str, Any]] = []
        self._where(_Recorder(steps))
        return _rebuild(self._tree, steps, function)


class _Recorder:
    def __init__(self, steps: list[tuple[str, Any]]) -> None:
        self._steps = steps

    def __getattr__(self, name: str) -> _Recorder:
        self._steps.append(("field", name))
        return self

    def __getitem__(self, key: Any) -> _Recorder:
        self._steps.append(("item", key))
        return self


def at(tree: Any, where: Callable[[Any], Any]) -> At:
    """Points at one place of a tree: `at(state, lambda s: s.params["actor"].head).set(new)`."""
    return At(tree, where)


def _rebuild(node: Any, steps: list[tuple[str, Any]], function: Callable[[Any], Any]) -> Any:
    if not steps:
        return function(node)
    (kind, key), rest = steps[0], steps[1:]
    if kind == "field":
        if not is_record(node) or key not in field_names(node):
            raise ValueError(f"at: {type(node).__name__} has no field {key!r}")
        values = {n: getattr(node, n) for n in field_names(node)}
        values[key] = _rebuild(values[key], rest, function)
        return type(node)(**values)
    if isinstance(node, dict):
        return {**node, key: _rebuild(node[key], rest, function)}
    items = list(node)
    items[key] = _rebuild(items[key], rest, function)
    return type(node)(items)


def equal(first: Tree, second: Tree) -> bool:
    """True when two trees have one structure and bitwise equal leaves (NaN equals the same NaN)."""
    return first_difference(first, second) is None


def first_difference(first: Tree, second: Tree) -> str | None:
    """The first path where two trees differ, with what differs; `None` when they are equal bit for bit."""
    structure = _structure_difference(first, second)
    if structure is not None:
        return structure
    others = pytree.tree_structure(first).flatten_up_to(second)
    for (path, a), b in zip(leaves_with_path(first), others, strict=True):
        difference = _leaf_difference(a, b)
        if difference is not None:
            return f"{path or '<root>'}: {difference}"
    return None


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as uint8, so that NaNs and signed zeros compare exactly."""
    flat = tensor.detach().cpu().reshape(-1)
    # a single element may have any stride and still pass for contiguous
    return (flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def _leaf_difference(a: Any, b: Any) -> str | None:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape:
            return f"shape {tuple(a.shape)} against {tuple(b.shape)}"
        if a.dtype != b.dtype:
            return f"dtype {a.dtype} against {b.dtype}"
        different = (bits(a) != bits(b)).reshape(a.numel(), -1).any(dim=1) if a.numel() else torch.zeros(0)
        count = int(different.sum())
        return f"{count} of {a.numel()} elements differ" if count else None
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return _array_difference(a, b)
    if isinstance(a, float) and isinstance(b, float):
        return None if repr(a) == repr(b) else f"{a!r} against {b!r}"
    return None if type(a) is type(b) and a == b else f"{a!r} against {b!r}"


def _array_difference(a: np.ndarray, b: np.ndarray) -> str | None:
    """The same for arrays of numpy, which are leaves too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {a.shape} against {b.dtype} {b.shape}"
    if a.tobytes() == b.tobytes():
        return None
    different = sum(x.tobytes() != y.tobytes() for x, y in zip(a.reshape(-1), b.reshape(-1), strict=True))
    return f"{different} of {a.size} elements differ" if different else None


def _structure_difference(first: Tree, second: Tree) -> str | None:
    """The first path where containers differ. The order of a dict's keys is no difference."""
    if pytree.tree_structure(first) == pytree.tree_structure(second):
        return None
    return _container_difference(first, second, ())


def _container_difference(a: Any, b: Any, path: tuple[Any, ...]) -> str | None:
    where = dotted(path) or "<root>"
    if pytree.tree_is_leaf(a) and pytree.tree_is_leaf(b):
        return None
    if type(a) is not type(b):
        return f"{where}: {type(a).__name__} against {type(b).__name__}"
    (ours, our_structure), (theirs, their_structure) = _one_level(a), _one_level(b)
    for step in [*ours, *theirs]:
        if step not in ours or step not in theirs:
            return f"{dotted((*path, step))}: only in the {'first' if step in ours else 'second'} tree"
    if not isinstance(a, dict) and our_structure != their_structure:
        return f"{where}: the static fields of two {type(a).__name__} differ"
    for step, child in ours.items():
        difference = _container_difference(child, theirs[step], (*path, step))
        if difference is not None:
            return difference
    return None


def _one_level(node: Any) -> tuple[dict[Any, Any], Any]:
    items, structure = pytree.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)
    return {path[0]: child for path, child in items}, structure
