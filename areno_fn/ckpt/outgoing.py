"""What a folder will hold: every tensor, its dtype, and how it is made of the leaves when its turn comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import torch

from areno_fn.ckpt.dtypes import DtypePolicy, converted
from areno_fn.ckpt.fit import claimed, differences, is_left_out, require_left_out
from areno_fn.ckpt.folder import HFFolder
from areno_fn.ckpt.host import passing
from areno_fn.ckpt.tensorfile import Reader
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import Iso, Part, Specs, Tensors, TensorSpec, views_of

Fetch = Callable[[str], torch.Tensor]


def outgoing(
    back: Iso, leaves: Tensors, source: HFFolder | None, policy: DtypePolicy, left_out: Collection[str]
) -> dict[str, TensorSpec]:
    """The tensors that the layout writes.

    Args:
        back: from the leaves to the tensors of the file.
        leaves: the leaves.
        source: the folder that they came from.
        policy: "source" gives each tensor the dtype it has in `source`, or the leaf's own without one.
        left_out: patterns of tensors of the source that the layout does not write.

    Raises:
        CheckpointError: the layout does not write what the source holds, or writes what is left out.
    """
    require_left_out(back.target, left_out)
    if source is not None:
        kept = claimed(source.specs, left_out)
        planned = {n: TensorSpec(s.shape, kept[n].dtype if n in kept else None) for n, s in back.target.items()}
        problems = differences(kept, planned)
        if problems:
            raise CheckpointError(f"the layout does not write the tensors of {source.path}: {'; '.join(problems)}")
    specs = {}
    for part in back.parts:
        for name, spec in part.target.items():
            own = leaves[part.needs[name][0]].dtype
            stored = source.specs[name].dtype if source is not None and policy == "source" else own
            specs[name] = TensorSpec(spec.shape, converted(stored or own, policy))
    return {name: specs[name] for name in back.target}


def passed_through(source: HFFolder | None, left_out: Collection[str]) -> dict[str, TensorSpec]:
    """The tensors of the source that are left out, as they are."""
    specs: Specs = source.specs if source is not None else {}
    return {name: spec for name, spec in specs.items() if is_left_out(name, left_out)}


class Maker:
    """Makes the tensors of a file one by one; several threads may ask.

    Those that are views of the leaves cost nothing. Of the others, which copy, only the part that was asked for
    last is kept.
    """

    def __init__(self, back: Iso, leaves: Tensors, specs: Specs) -> None:
        self._specs, self._leaves = specs, leaves
        self._views: dict[str, torch.Tensor] = {}
        self._parts: dict[str, Part] = {}
        for part in back.parts:
            views = views_of(part, {name: leaves[name] for name in part.source})
            if views is None:
                self._parts |= dict.fromkeys(part.target, part)
            else:
                self._views |= views
        self._lock = threading.Lock()
        self._last: tuple[Part, dict[str, torch.Tensor]] | None = None

    def __call__(self, name: str) -> torch.Tensor:
        """A tensor in the dtype that its specification has."""
        made = self._views[name] if name in self._views else self._copied(self._parts[name])[name]
        dtype = self._specs[name].dtype or made.dtype
        if made.dtype == dtype:
            return made
        return passing(tuple(made.shape), dtype, made.device).copy_(made)

    def _copied(self, part: Part) -> dict[str, torch.Tensor]:
        with self._lock:
            if self._last is None or self._last[0] is not part:
                self._last = None  # before the next one is made
                self._last = part, part.apply(self._leaves)
            return self._last[1]


def either(made: Fetch, kept: Collection[str], source: HFFolder | None, reader: Reader) -> Fetch:
    """Tensors that are read from the source as they are, and others that are made."""

    def fetch(name: str) -> torch.Tensor:
        if source is not None and name in kept:
            return reader.read(source.store.header(name), name)
        return made(name)

    return fetch
