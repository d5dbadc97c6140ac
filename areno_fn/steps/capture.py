"""Updates captured as CUDA graphs, one for every shape of what they are given; on a CPU the same updates as they are.

A graph knows tensors by their addresses, and records not at all: what it is made of and what it is given again are the
flat tuples of a tree's leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree

from areno_fn.contracts.errors import KernelError

Move = Callable[[Any, Any, Any], tuple[Any, Any]]
"""`(moved, frozen, given) -> (moved, told)`, trees of tensors; it may write to what is moved, and to nothing else."""


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


class Captured:
    """A move whose second call with a shape is captured and from then on replayed; made by `captured`."""

    def __init__(self, move: Move) -> None:
        self._move = move
        self._graphs: dict[Any, _Graph | None] = {}
        self._memory: Any = None

    def __call__(self, moved: Any, frozen: Any, given: Any) -> tuple[Any, Any]:
        """What the move returns. On a GPU the next call overwrites what is told.

        Raises:
            KernelError: a leaf is no tensor.
        """
        held, structure = pytree.tree_flatten((moved, frozen))
        read, shape = pytree.tree_flatten(given)
        for leaf in (*held, *read):
            if not isinstance(leaf, torch.Tensor):
                raise KernelError(
                    f"a captured update takes trees of tensors, and was given {leaf!r}; make it a static field of its record"
                )
        if not all(leaf.is_cuda for leaf in (*held, *read)):
            return self._move(moved, frozen, given)
        kind = (structure, shape, tuple((x.shape, x.dtype, x.stride()) for x in (*held, *read)))
        if kind not in self._graphs:
            # once as it is: kernels are compiled, and libraries take their memory
            self._graphs[kind] = None
            return self._move(moved, frozen, given)
        found = self._graphs[kind]
        if found is None or any(mine is not leaf for mine, leaf in zip(found.held, held, strict=True)):
            found = self._graphs[kind] = self._captured(moved, frozen, given)
        torch._foreach_copy_(list(found.given), read)
        found.graph.replay()
        torch.autograd.graph.increment_version(pytree.tree_leaves(moved))
        return moved, found.told

    def _captured(self, moved: Any, frozen: Any, given: Any) -> _Graph:
        own = pytree.tree_map(torch.clone, given)
        graph = torch.cuda.CUDAGraph()
        # another thread may be copying a checkpoint to the host meanwhile
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            after, told = self._move(moved, frozen, own)
            for old, new in zip(pytree.tree_leaves(moved), pytree.tree_leaves(after), strict=True):
                if new is not old:
                    old.copy_(new)
        self._memory = graph.pool()  # shapes take turns, so that one memory serves them all
        held = tuple(pytree.tree_leaves((moved, frozen)))
        return _Graph(graph, held, tuple(pytree.tree_leaves(own)), told)


def captured(move: Move) -> Captured:
    """The same move, captured on a GPU.

    The first call of a shape runs as it is; the second is captured. What is moved stays where it is: a caller that hands
    back what it got finds the graph again, and other tensors are captured anew, as are other frozen ones. What is given may
    lie anywhere.

    Args:
        move: `(moved, frozen, given) -> (moved, told)`, which never waits for the device.
    """
    return Captured(move)
