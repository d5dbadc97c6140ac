"""Updates captured as CUDA graphs, one for every shape of what they are given; on a CPU the same updates as they are.

A graph knows tensors by their addresses, and records not at all: what it is made of and what it is given again are the
flat tuples of a tree's leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import count as numbers
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree

from areno_fn import tree
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import KernelError, SpecError

Move = Callable[[Any, Any, Any], tuple[Any, Any]]
"""`(moved, frozen, given) -> (moved, told)`, trees of tensors; it may write to what is moved, and to nothing else."""

MOST = 16
"""Graphs that are kept, as a rule."""


@attrs.frozen(eq=False)
class _Graph:
    """A captured move.

    Attributes:
        graph: replays it.
        held: the leaves of what is moved and of what is frozen, which it finds by their addresses.
        given: the leaves that other ones are copied to before a replay.
        told: what it returns beside, written anew by every replay.
    """

    graph: torch.cuda.CUDAGraph
    held: tuple[torch.Tensor, ...]
    given: tuple[torch.Tensor, ...]
    told: Any


class Graphs:
    """The graphs of one or more moves that take turns, in one memory; the one that was not used for longest gives way.

    Args:
        most: shapes that are remembered, and so graphs that are kept, of all moves together.

    Raises:
        SpecError: `most` is not at least 1.
        RecordError: it is no whole number.
    """

    @checked
    def __init__(self, most: int = MOST) -> None:
        if most < 1:
            raise SpecError(f"Graphs needs most of at least 1, received {most}")
        self.most = most
        self.memory: Any = None
        self._held: OrderedDict[Any, _Graph | None] = OrderedDict()
        self._numbers = numbers()
        self.last: dict[int, _Held] = {}

    def number(self) -> int:
        """A number for the shapes of one move."""
        return next(self._numbers)

    def seen(self, kind: Any) -> bool:
        """Whether a shape is remembered."""
        return kind in self._held

    def of(self, kind: Any) -> _Graph | None:
        """The graph of a shape that is remembered, where there is one; it is then the one that was used last."""
        self._held.move_to_end(kind)
        return self._held[kind]

    def put(self, kind: Any, graph: _Graph | None) -> None:
        """Remembers a shape, with its graph once it is captured."""
        self._held[kind] = graph
        self._held.move_to_end(kind)
        if len(self._held) > self.most:
            self._held.popitem(last=False)
        kept = [one for one in self._held.values() if one is not None]
        # a memory without a graph cannot be asked for again
        self.memory = kept[-1].graph.pool() if kept else None

    def clear(self) -> None:
        """Forgets all, and gives their memory back; of what was moved nothing is kept either."""
        self._held.clear()
        self.last.clear()
        self.memory = None

    @property
    def count(self) -> int:
        """How many graphs there are."""
        return sum(graph is not None for graph in self._held.values())


class Captured:
    """A move whose second call with a shape is captured and from then on replayed; made by `captured`."""

    def __init__(self, move: Move, graphs: Graphs) -> None:
        self._move = move
        self._graphs = graphs
        self._number = graphs.number()

    def __call__(self, moved: Any, frozen: Any, given: Any) -> tuple[Any, Any]:
        """What the move returns. On a GPU the next call overwrites what is told, and what is moved stays where it is.

        Raises:
            KernelError: a leaf is no tensor, or something in the move cannot be captured.
        """
        held = self._graphs.last[self._number] = _held(moved, frozen, self._graphs.last.get(self._number, _NOTHING))
        read, shape = pytree.tree_flatten(given)
        _require_tensors(read)
        if not captures(held.all, read):
            return self._move(moved, frozen, given)
        kind = (self._number, held.kind, shape, _forms(read))
        if not self._graphs.seen(kind):
            # once as it is: kernels are compiled, and libraries take their memory
            told = self._moved(moved, frozen, given)
            self._graphs.put(kind, None)
            return moved, told
        found = self._graphs.of(kind)
        if found is None or (found.held is not held.all and not _same(found.held, held.all)):
            found = self._captured(kind, moved, frozen, given)
        torch._foreach_copy_(list(found.given), read)
        found.graph.replay()
        torch.autograd.graph.increment_version(held.moved)
        return moved, found.told

    def _moved(self, moved: Any, frozen: Any, given: Any) -> Any:
        """What the move tells. What it moves stays where it is, so that graphs of other shapes find it."""
        after, told = self._move(moved, frozen, given)
        for old, new in zip(pytree.tree_leaves(moved), pytree.tree_leaves(after), strict=True):
            if new is not old:
                old.copy_(new)
        return told

    def _captured(self, kind: Any, moved: Any, frozen: Any, given: Any) -> _Graph:
        own = pytree.tree_map(torch.clone, given)
        graph = torch.cuda.CUDAGraph()
        try:
            # another thread may be copying a checkpoint to the host meanwhile
            with torch.cuda.graph(graph, pool=self._graphs.memory, capture_error_mode="thread_local"):
                told = self._moved(moved, frozen, own)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise KernelError(
                f"an update cannot be captured as a graph, because something in it waits for the device or is not for one "
                f"({str(error).splitlines()[0]}); do without that, or without capture"
            ) from error
        made = _Graph(graph, self._graphs.last[self._number].all, tuple(pytree.tree_leaves(own)), told)
        self._graphs.put(kind, made)
        return made


@attrs.frozen(eq=False)
class _Held:
    """What is moved and what is frozen.

    Attributes:
        nodes: their containers and leaves.
        moved, all: the leaves of what is moved, and of both.
        kind: structure, shapes and dtypes; compared with `==`.
    """

    nodes: Sequence[Any]
    moved: tuple[torch.Tensor, ...]
    all: tuple[torch.Tensor, ...]
    kind: Any


_NOTHING = _Held(nodes=(), moved=(), all=(), kind=None)


def _held(moved: Any, frozen: Any, before: _Held) -> _Held:
    """What is held now; what was held before, where it is made of the same objects.

    Every step makes the outermost containers anew. Comparing structures takes longer than the host has beside a graph.
    """
    nodes = [type(moved), type(frozen), *tree.nodes(moved)[1:], *tree.nodes(frozen)[1:]]
    names = tuple(frozen) if isinstance(frozen, Mapping) else ()
    if before.kind is not None and before.kind.names == names and _same(before.nodes, nodes):
        return before
    leaves, structure = pytree.tree_flatten((moved, frozen))
    _require_tensors(leaves)
    count = len(pytree.tree_leaves(moved))
    return _Held(nodes, tuple(leaves[:count]), tuple(leaves), _Kind(names, structure, _forms(leaves)))


@attrs.frozen(cache_hash=True)
class _Kind:
    names: tuple[Any, ...]
    structure: Any
    forms: Any


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _forms(leaves: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((x.shape, x.dtype, x.stride()) for x in leaves)


def _require_tensors(leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise KernelError(
                f"a captured update takes trees of tensors, and was given {leaf!r}; make it a static field of its record"
            )


def captures(held: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> bool:
    """Whether a move of such leaves is captured: all of them lie on a GPU."""
    return all(leaf.is_cuda for leaf in (*held, *read))


def captured(move: Move, graphs: Graphs | None = None) -> Captured:
    """The same move, captured on a GPU.

    The first call of a shape runs as it is; the second is captured. What is moved stays where it is: a caller that hands
    back what it got finds the graph again, and other tensors are captured anew, as are other frozen ones. What is given may
    lie anywhere.

    Args:
        move: `(moved, frozen, given) -> (moved, told)`, which never waits for the device.
        graphs: where graphs are kept; with those of other moves, if they are given the same.
    """
    return Captured(move, Graphs() if graphs is None else graphs)
