"""What a folder has against what a layout claims, compared before any weight is read or written."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping

import torch

from areno_fn.ckpt.dtypes import DtypePolicy, converted
from areno_fn.ckpt.folder import HFFolder
from areno_fn.ckpt.words import MOST_SHOWN, brief
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import Iso, Specs, TensorSpec


def require_fit(folder: HFFolder, iso: Iso, dtype: DtypePolicy = "source", *, left_out: Collection[str] = ()) -> None:
    """Compares the headers of a folder with what a layout claims, before any weight is read.

    Args:
        folder: what `open_folder` returned.
        iso: from the tensors in the file to the leaves.
        dtype: what floating tensors are to become.
        left_out: patterns of tensors, such as `model.visual.*`, that the file may hold and the layout does not take.

    Raises:
        CheckpointError: lists every tensor that is missing, not claimed, or of another shape or dtype, and
            every leaf that would be joined from tensors of several dtypes; of each kind the first twenty and how
            many there are. Or a pattern of `left_out` matches a tensor that the layout claims.
    """
    require_left_out(iso.source, left_out)
    found = claimed(folder.specs, left_out)
    problems = differences(iso.source, found)
    problems += _listed(
        [_mixed(folder, part.source, part.target) for part in iso.parts if _kinds(found, part.source, dtype) > 1]
    )
    if problems:
        raise CheckpointError(f"{folder.path}: its tensors are not those of the model: {'; '.join(problems)}")


def require_left_out(claims: Specs, left_out: Collection[str]) -> None:
    """Refuses patterns that match what a layout claims.

    Raises:
        CheckpointError: names each such pattern and a tensor, or it is one text instead of a collection of them.
    """
    if isinstance(left_out, str):  # each of its characters would be a pattern
        raise CheckpointError(f"what is left out is a collection of patterns, such as ({left_out!r},), received a text")
    both = [(pattern, name) for pattern in left_out for name in claims if fnmatch.fnmatchcase(name, pattern)]
    first = dict(reversed(both))
    if first:
        shown = "; ".join(f"{pattern!r} matches {name!r}" for pattern, name in first.items())
        raise CheckpointError(f"what is left out must not be claimed by the layout, but {shown}")


def is_left_out(name: str, left_out: Iterable[str]) -> bool:
    """Whether a tensor is matched by one of the patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in left_out)


def claimed(specs: Specs, left_out: Collection[str]) -> Specs:
    """The tensors of a folder that the layout has to claim."""
    return {name: spec for name, spec in specs.items() if not is_left_out(name, left_out)} if left_out else specs


def differences(wanted: Specs, found: Specs) -> list[str]:
    """In what the tensors that are found are not those wanted: of each kind at most twenty, and how many there are."""
    missing = [f"{brief(name)} is missing" for name in wanted if name not in found]
    unknown = [f"{brief(name)} is not declared" for name in found if name not in wanted]
    wrong = [
        f"{brief(name)} is {spec}, declared {wanted[name]}"
        for name, spec in found.items()
        if name in wanted and not wanted[name].admits(spec)
    ]
    return _listed(missing) + _listed(unknown) + _listed(wrong)


def loaded_dtype(spec: TensorSpec, policy: DtypePolicy) -> torch.dtype:
    """The dtype that a tensor of a file has once it is loaded."""
    return converted(spec.dtype or torch.float32, policy)


def _listed(problems: list[str]) -> list[str]:
    rest = len(problems) - MOST_SHOWN
    return problems if rest <= 0 else [*problems[:MOST_SHOWN], f"and {rest} more like this"]


def _kinds(found: Specs, names: Iterable[str], policy: DtypePolicy) -> int:
    return len({loaded_dtype(found[name], policy) for name in names if name in found})


def _mixed(folder: HFFolder, source: Mapping[str, TensorSpec], target: Mapping[str, TensorSpec]) -> str:
    parts = ", ".join(f"{brief(name)} {folder.specs[name]}" for name in source if name in folder)
    return f"{', '.join(map(repr, target))} from {parts} joins several dtypes, so load with one dtype"
