"""An adapter of a pipeline stands in a folder twice, for PEFT and for diffusers: whether both files say the same."""

from __future__ import annotations

from collections.abc import Iterator

from areno_fn.ckpt.peft import AdapterFolder, open_twin
from areno_fn.ckpt.tensorfile import Reader
from areno_fn.ckpt.tools.numbers import Compared, compared
from areno_fn.ckpt.tools.pieces import piece, summed
from areno_fn.contracts.errors import CheckpointError


def twin_problems(opened: AdapterFolder) -> list[str]:
    """Everything in which diffusers' file differs from PEFT's, a sentence each; every number of both is read.

    Empty where one of them stands alone.
    """
    try:
        twin = open_twin(opened)
    except CheckpointError as error:
        return [str(error)]
    return [] if twin is None else [*_modules(opened, twin), *_scales(opened, twin), *_numbers(opened, twin)]


def _modules(one: AdapterFolder, other: AdapterFolder) -> Iterator[str]:
    for first, second in ((one, other), (other, one)):
        missing = sorted(set(first.modules) - set(second.modules))
        if missing:
            more = f" ({len(missing)} such modules)" if len(missing) > 1 else ""
            yield f"{second.header.path} lacks {missing[0]!r}{more}, which {first.header.path.name} adapts"


def _scales(one: AdapterFolder, other: AdapterFolder) -> Iterator[str]:
    for module in _shared(one, other):
        for name in ("rank", "alpha", "scale"):
            ours, theirs = (getattr(side.config, name)(module) for side in (one, other))
            if ours != theirs:
                yield f"{other.header.path}: {module!r} has {name} {theirs:g}, but for PEFT it is {ours:g}"
                break


def _numbers(one: AdapterFolder, other: AdapterFolder) -> Iterator[str]:
    known = {name: entry.spec for name, entry in one.header.entries.items() if name in other.header.entries}
    for name, spec in known.items():
        if other.header.entries[name].spec != spec:
            yield f"{other.header.path}: what PEFT calls {name!r} is {other.header.entries[name].spec}, but for PEFT {spec}"
    same = {name: spec.numel for name, spec in known.items() if other.header.entries[name].spec == spec}
    with Reader() as reader:

        def work(name: str, first: int) -> Compared:
            return compared(*(piece(reader, side.header, name, first) for side in (one, other)))

        for name, found in summed(work, same, Compared()).items():
            if found.differing:
                yield (
                    f"{other.header.path}: {found.differing} of {same[name]} numbers of what PEFT calls {name!r} differ from "
                    f"those of {one.header.path.name}"
                )


def _shared(one: AdapterFolder, other: AdapterFolder) -> list[str]:
    return [module for module in one.modules if module in other.modules]
