"""What is computed from parameters and used until they change: merged weights, fetched snapshots, cached numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
import torch.utils._pytree as pytree

T = TypeVar("T")


class Seal:
    """Tells whether a tree is the one that it was made of, by the identity of its tensors; keeps none of them alive.

    A tensor that was written to in place since then is another one.
    """

    def __init__(self, source: Any) -> None:
        leaves, self._structure = pytree.tree_flatten(source)
        self._marks = [_mark(leaf) for leaf in leaves]

    def fits(self, source: Any) -> bool:
        """True for the same tensors, unwritten, in the same places."""
        leaves, structure = pytree.tree_flatten(source)
        return structure == self._structure and all(
            is_it(leaf) for is_it, leaf in zip(self._marks, leaves, strict=True)
        )


class Derived(Generic[T]):
    """Something made from a tree, made again exactly when the tree is another one.

    It holds at most one: what is stale is let go before its successor is made.

    Args:
        make: from the tree to what is derived; a pure function.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self._held: tuple[Seal, T] | None = None

    @property
    def is_held(self) -> bool:
        """Whether there is something in memory."""
        return self._held is not None

    def of(self, source: Any) -> T:
        """What is derived from this tree."""
        if self._held is not None and self._held[0].fits(source):
            return self._held[1]
        self.clear()
        seal, made = Seal(source), self._make(source)
        self._held = seal, made
        return made

    def clear(self) -> None:
        """Lets it go."""
        self._held = None


def _mark(leaf: Any) -> Callable[[Any], bool]:
    """Whether something is this leaf still."""
    if not isinstance(leaf, torch.Tensor):
        return lambda now: type(now) is type(leaf) and bool(now == leaf)
    kept, version = weakref.ref(leaf), leaf._version
    return lambda now: isinstance(now, torch.Tensor) and now is kept() and now._version == version
