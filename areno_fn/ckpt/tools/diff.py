"""`diff A B`: in what two checkpoints differ, in the memory of a few pieces."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import attrs
import torch

from areno_fn.ckpt.tensorfile import Reader
from areno_fn.ckpt.tools.numbers import Compared, compared
from areno_fn.ckpt.tools.pieces import Progress, piece, summed
from areno_fn.ckpt.tools.source import Source
from areno_fn.ckpt.tools.ties import embedding_of, is_tied
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import TensorSpec


@attrs.frozen(kw_only=True)
class Tie:
    """A head that stands in one file only, while the other checkpoint ties it to its embedding.

    Attributes:
        name: the head.
        only_in: the side that stores it.
        embedding: what the other one has in its place.
        compared: the two; None when they have different shapes.
    """

    name: str
    only_in: Literal["A", "B"]
    embedding: str
    compared: Compared | None = None

    @property
    def pair(self) -> tuple[str, str]:
        """The tensor of A and the tensor of B that should be one."""
        return (self.name, self.embedding) if self.only_in == "A" else (self.embedding, self.name)


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
        config: fields of two configurations that differ; they are no difference of the tensors, and are not counted.
    """

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    shapes: Mapping[str, tuple[TensorSpec, TensorSpec]]
    dtypes: Mapping[str, tuple[TensorSpec, TensorSpec]]
    tensors: Mapping[str, Compared]
    values: Mapping[str, tuple[Any, Any]]
    ties: tuple[Tie, ...]
    config: Mapping[str, tuple[Any, Any]]

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


def difference(
    a: Source,
    b: Source,
    patterns: Collection[str] = (),
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Difference:
    """Compares two checkpoints; no more than a few pieces of a tensor are in memory at any time.

    Args:
        a, b: what `open_source` returned.
        patterns: only tensors and values whose names match one of these are compared; all when there is none.
        device: where the numbers are compared.
        progress: told after every piece.

    Raises:
        CheckpointError: no name matches, or a file changed under the reader.
    """
    ours, theirs = _specs(a, patterns), _specs(b, patterns)
    values = _values(a, b, patterns)
    if patterns and not ours and not theirs and not values:
        raise CheckpointError(f"no tensor of {a.path} or {b.path} matches {' or '.join(map(repr, patterns))}")
    both = [name for name in ours if name in theirs]
    missing = tuple(name for name in ours if name not in theirs)
    extra = tuple(name for name in theirs if name not in ours)
    ties = (*_ties(missing, "A", b), *_ties(extra, "B", a))
    alike = [(name, name) for name in both if ours[name].shape == theirs[name].shape]
    pairs = _compared(a, b, [*alike, *(tie.pair for tie in ties)], torch.device(device), progress)
    return Difference(
        missing=missing,
        extra=extra,
        shapes={n: (ours[n], theirs[n]) for n in both if ours[n].shape != theirs[n].shape},
        dtypes={n: (ours[n], theirs[n]) for n in both if ours[n].dtype != theirs[n].dtype},
        tensors={ours: pairs[ours, theirs] for ours, theirs in alike},
        values=values,
        ties=tuple(attrs.evolve(tie, compared=pairs.get(tie.pair)) for tie in ties),
        config=_other(a.config, b.config) if a.config and b.config else {},
    )


def _compared(
    a: Source, b: Source, pairs: Collection[tuple[str, str]], device: torch.device, progress: Progress | None
) -> dict[tuple[str, str], Compared]:
    """Tensors of A with tensors of B, those that have one shape."""
    alike = {pair: a.entry(pair[0]).spec for pair in pairs if _shape(a, pair[0]) == _shape(b, pair[1])}
    with Reader() as ours, Reader() as theirs:

        def work(pair: tuple[str, str], first: int) -> Compared:
            x = piece(ours, a.header(pair[0]), pair[0], first)
            y = piece(theirs, b.header(pair[1]), pair[1], first)
            return compared(x.to(device), y.to(device))

        return summed(work, {pair: spec.numel for pair, spec in alike.items()}, Compared(), progress)


def _shape(source: Source, name: str) -> tuple[int, ...]:
    return source.entry(name).spec.shape


def _specs(source: Source, patterns: Collection[str]) -> dict[str, TensorSpec]:
    return {name: source.entry(name).spec for name in source.files if _wanted(name, patterns)}


def _values(a: Source, b: Source, patterns: Collection[str]) -> dict[str, tuple[Any, Any]]:
    found = _other(a.values, b.values) if a.kind == b.kind else {}
    return {name: pair for name, pair in found.items() if _wanted(name, patterns)}


def _other(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (a.get(name), b.get(name)) for name in {**a, **b}}
    return {name: pair for name, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}


def _wanted(name: str, patterns: Collection[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _ties(alone: Collection[str], side: Literal["A", "B"], other: Source) -> list[Tie]:
    """Those of the tensors of one side alone that the other side ties."""
    if not is_tied(other.config):
        return []
    found = {name: embedding_of(name, other.files) for name in alone}
    return [Tie(name=name, only_in=side, embedding=one) for name, one in found.items() if one is not None]
