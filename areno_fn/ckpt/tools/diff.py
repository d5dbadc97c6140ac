"""`diff A B`: in what two checkpoints differ, in the memory of a few pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch

from areno_fn.ckpt.tensorfile import Reader
from areno_fn.ckpt.tools.numbers import Compared, compared
from areno_fn.ckpt.tools.pieces import ahead, pieces
from areno_fn.ckpt.tools.source import Source
from areno_fn.ckpt.tools.ties import embedding_of, is_tied
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import TensorSpec


@attrs.frozen(kw_only=True)
class Tie:
    """A head that stands in one file only, while the other checkpoint ties it to its embedding.

    Attributes:
        name: the head.
        only_in: "A" or "B".
        embedding: what the other one has in its place.
        compared: the two; None when they have different shapes.
    """

    name: str
    only_in: str
    embedding: str
    compared: Compared | None


@attrs.frozen(kw_only=True)
class Difference:
    """Everything in which two checkpoints differ.

    Attributes:
        missing: tensors of A alone.
        extra: tensors of B alone.
        shapes, dtypes: by name, what each has, for tensors whose shapes, and whose dtypes, differ.
        tensors: by name, those that both have in one shape.
        values: by path, numbers and strings of two states that differ; None stands where there is none.
        ties: those of the missing and extra tensors that the other side ties.
    """

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    shapes: Mapping[str, tuple[TensorSpec, TensorSpec]]
    dtypes: Mapping[str, tuple[TensorSpec, TensorSpec]]
    tensors: Mapping[str, Compared]
    values: Mapping[str, tuple[Any, Any]]
    ties: tuple[Tie, ...]

    @property
    def unequal(self) -> dict[str, Compared]:
        """Tensors of one shape that differ in a bit or in dtype, the largest relative difference first."""
        found = [(n, c) for n, c in self.tensors.items() if c.differing or n in self.dtypes]
        return dict(sorted(found, key=lambda item: (-item[1].relative, -item[1].largest, item[0])))

    @property
    def equal(self) -> int:
        """How many tensors are the same in name, shape, dtype and every bit."""
        return len(self.tensors) - len(self.unequal)

    @property
    def same(self) -> bool:
        """Nothing differs."""
        return not (self.missing or self.extra or self.shapes or self.values or self.unequal)


def difference(a: Source, b: Source, patterns: Collection[str] = (), device: torch.device | str = "cpu") -> Difference:
    """Compares two checkpoints; no more than a few pieces of a tensor are in memory at any time.

    Args:
        a, b: what `open_source` returned.
        patterns: only tensors and values whose names match one of these are compared; all when there is none.
        device: where the numbers are compared.

    Raises:
        CheckpointError: no name matches, or a file changed under the reader.
    """
    ours, theirs = _specs(a, patterns), _specs(b, patterns)
    values = _values(a, b, patterns)
    if patterns and not ours and not theirs and not values:
        raise CheckpointError(f"no tensor of {a.path} or {b.path} matches {', '.join(patterns)}")
    both = [name for name in ours if name in theirs]
    missing = tuple(name for name in ours if name not in theirs)
    extra = tuple(name for name in theirs if name not in ours)
    with _Comparer(a, b, torch.device(device)) as comparer:
        return Difference(
            missing=missing,
            extra=extra,
            shapes={n: (ours[n], theirs[n]) for n in both if ours[n].shape != theirs[n].shape},
            dtypes={n: (ours[n], theirs[n]) for n in both if ours[n].dtype != theirs[n].dtype},
            tensors={n: comparer(n, n) for n in both if ours[n].shape == theirs[n].shape},
            values=values,
            ties=(*_ties(comparer, missing, "A"), *_ties(comparer, extra, "B")),
        )


class _Comparer:
    """Compares one tensor of each side. A context manager; it keeps files open and reads ahead."""

    def __init__(self, a: Source, b: Source, device: torch.device) -> None:
        self.a, self.b = a, b
        self._device = device
        self._readers = Reader(), Reader()
        self._pool = ThreadPoolExecutor(2)

    def __enter__(self) -> _Comparer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for reader in self._readers:
            reader.__exit__(None, None, None)

    def __call__(self, ours: str, theirs: str) -> Compared:
        return compared(zip(self._read(0, self.a, ours), self._read(1, self.b, theirs), strict=True))

    def _read(self, side: int, source: Source, name: str) -> Iterator[torch.Tensor]:
        read = pieces(self._readers[side], source.header(name), name)
        return (piece.to(self._device) for piece in ahead(self._pool, read))


def _specs(source: Source, patterns: Collection[str]) -> dict[str, TensorSpec]:
    return {name: source.entry(name).spec for name in source.files if _wanted(name, patterns)}


def _values(a: Source, b: Source, patterns: Collection[str]) -> dict[str, tuple[Any, Any]]:
    if a.kind != b.kind:
        return {}
    names = [name for name in {**a.values, **b.values} if _wanted(name, patterns)]
    pairs = {name: (a.values.get(name), b.values.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}


def _wanted(name: str, patterns: Collection[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _ties(comparer: _Comparer, alone: Collection[str], side: str) -> Iterator[Tie]:
    other = comparer.b if side == "A" else comparer.a
    if not is_tied(other.config):
        return
    own = comparer.a if side == "A" else comparer.b
    for name in alone:
        embedding = embedding_of(name, other.files)
        if embedding is not None:
            alike = own.entry(name).spec.shape == other.entry(embedding).spec.shape
            pair = (name, embedding) if side == "A" else (embedding, name)
            yield Tie(name=name, only_in=side, embedding=embedding, compared=comparer(*pair) if alike else None)
