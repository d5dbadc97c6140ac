"""Writing a Hugging Face folder: the inverse of loading one, with everything the source had beside its weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from areno_fn import tree
from areno_fn.ckpt import atomic, disk
from areno_fn.ckpt.carry import carried, require_replaceable
from areno_fn.ckpt.dtypes import DtypePolicy
from areno_fn.ckpt.folder import CONFIG, HFFolder
from areno_fn.ckpt.naming import TRANSFORMERS, Naming
from areno_fn.ckpt.outgoing import Maker, either, outgoing, passed_through
from areno_fn.ckpt.paths import destination, is_plain
from areno_fn.ckpt.shards import json_text, write_weights
from areno_fn.ckpt.tensorfile import Reader
from areno_fn.ckpt.words import brief
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import Iso, ParamLayout, TensorSpec


def save(
    out: str | Path,
    params: Any,
    iso: Iso,
    config: Mapping[str, Any],
    *,
    source: HFFolder | None = None,
    dtype: DtypePolicy = "source",
    left_out: Collection[str] = (),
    passthrough: bool = True,
    shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    without: Collection[str] = (),
    threads: int = 2,
    naming: Naming | None = None,
) -> Path:
    """Writes a folder that `open_folder`, and transformers, read. It appears whole, or the old one stays.

    Args:
        out: the folder. One that is there is replaced, if it holds nothing but what such a folder holds.
        params: the parameter tree, or a dict from paths to tensors.
        iso: from the tensors in the file to the leaves, as for `load`.
        config: the contents of config.json; its dtype is set to `dtype` when that converts.
        source: the folder that the parameters came from. Its tensor names are written again, no more and no
            fewer, and its tokenizer, chat template, generation configuration and licence are carried over.
        dtype: "source" gives each tensor the dtype it has in `source`, or the parameter's own without one.
        left_out: patterns of tensors of `source`, such as `model.visual.*`, that the layout does not write.
        passthrough: write what is left out as it stands in `source`, byte for byte and whatever `dtype` says.
            False writes a folder without it, whose `config` must not promise it.
        shard_bytes: most bytes of tensors in one file; a single file is written when all fit.
        metadata: more strings for the headers, beside those of `source`.
        files: further files by name, such as `a.json` or `a/b.json`; they win over carried ones.
        without: patterns of names that are not carried over from `source`.
        threads: how many weight files are written at a time.
        naming: what they are called, such as `areno_fn.ckpt.naming.DIFFUSERS`; None: as in `source`, or as
            transformers does without one.

    Returns:
        The folder.

    Raises:
        CheckpointError: the tensors are not those of `source`, `left_out` names one that the layout writes, `out`
            holds other things, or the disk refuses.
        LayoutError: the parameters are not what the layout takes.
    """
    leaves = dict(tree.leaves_with_path(params))
    back = iso.inverse
    ParamLayout(back.source).check(leaves, "the parameters")
    specs = outgoing(back, leaves, source, dtype, left_out)
    kept = passed_through(source, left_out) if passthrough else {}
    for device in {leaf.device for leaf in leaves.values() if leaf.is_cuda}:
        torch.cuda.current_stream(device).synchronize()  # the threads that copy have streams of their own
    with Reader() as reader:
        return write_folder(
            out,
            specs | kept,
            either(Maker(back, leaves, specs), kept, source, reader),
            with_dtype(config, dtype),
            source=source,
            shard_bytes=shard_bytes,
            metadata=metadata,
            files=files,
            without=without,
            threads=threads,
            naming=naming,
        )


def write_folder(
    out: str | Path,
    specs: Mapping[str, TensorSpec],
    fetch: Callable[[str], torch.Tensor],
    config: Mapping[str, Any],
    *,
    source: HFFolder | None = None,
    shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    without: Collection[str] = (),
    threads: int = 1,
    naming: Naming | None = None,
) -> Path:
    """Writes a folder of tensors that are made one by one; the part of `save` that needs no layout.

    Args:
        specs: every tensor of the files, with its dtype.
        fetch: gives each tensor when its turn comes; called by several threads when `threads` is more than one.
        out, config, source, shard_bytes, metadata, files, without, threads, naming: as for `save`.

    Returns:
        The folder.

    Raises:
        CheckpointError: a tensor is not what was declared, a file cannot have its name, `out` holds other things, or
            the disk refuses.
    """
    called = naming or (source.store.naming if source else TRANSFORMERS)
    _require_others(files or {}, called)
    others = {CONFIG: json_text(config), **carried(source, without), **(files or {})}
    require_replaceable(destination(out), set(others))
    header = {**(source.store.metadata if source else {}), **(metadata or {}), "format": "pt"}
    index = dict(source.store.index_metadata or {}) if source else {}
    with atomic.folder(Path(out)) as scratch:
        write_weights(scratch, specs, fetch, header, index, shard_bytes, threads, called)
        _write_others(scratch, others)
    return Path(out)


def with_dtype(config: Mapping[str, Any], policy: DtypePolicy) -> dict[str, Any]:
    """The contents of config.json for weights that a policy has converted."""
    if policy == "source":
        return dict(config)
    named = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    return {**config, **dict.fromkeys(named, policy)}


def _require_others(names: Collection[str], naming: Naming) -> None:
    for name in names:
        if not is_plain(name):
            raise CheckpointError(f"files: the name {brief(name)} must be a plain path inside the folder")
        if name == CONFIG or any(fnmatchcase(name, taken) for taken in (naming.single, naming.index, naming.pattern)):
            raise CheckpointError(f"files: {name!r} is the name of a file that is written anyway; choose another one")


def _write_others(scratch: Path, others: Mapping[str, bytes]) -> None:
    parents = {parent for name in others for parent in (scratch / name).parents if scratch in parent.parents}
    folders = sorted(parents)  # each before those in it
    for folder in folders:
        disk.make_folder(folder)
    for name, data in others.items():
        atomic.write_file(scratch / name, data)
    for folder in folders:
        disk.sync_folder(folder)
