"""The weights of a Hugging Face folder: one file, or several of a bounded size and their index."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from areno_fn.ckpt import atomic
from areno_fn.ckpt.naming import Naming
from areno_fn.ckpt.tensorfile import write_tensors
from areno_fn.ckpt.words import encoded
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import Specs, TensorSpec


def write_weights(
    folder: Path,
    specs: Specs,
    fetch: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
    index: Mapping[str, Any],
    shard_bytes: int,
    threads: int,
    naming: Naming,
) -> None:
    """Writes the files and, where there are several, the index with the exact size of all tensors.

    Args:
        folder: where; it must hold no weights.
        specs: every tensor, with its dtype, in the order in which they are dealt to the files.
        fetch: gives each tensor when its turn comes; called by several threads when `threads` is more than one.
        metadata: strings for the header of every file.
        index: metadata for the index; `total_size` is added.
        shard_bytes: most bytes of tensors in a file; a tensor that is larger has one for itself.
        threads: how many files are written at a time.
        naming: what they are called.

    Raises:
        CheckpointError: `shard_bytes` or `threads` is less than one, or a tensor is not what was declared.
        OSError: the disk refuses.
    """
    if threads < 1:
        raise CheckpointError(f"threads must be at least 1, received {threads}")
    shards = _shards(specs, shard_bytes)
    names = naming.files(len(shards))
    with ThreadPoolExecutor(min(threads, len(shards)), thread_name_prefix="write") as pool:
        written = [
            pool.submit(write_tensors, folder / name, {tensor: specs[tensor] for tensor in tensors}, fetch, metadata)
            for name, tensors in zip(names, shards, strict=True)
        ]
        try:
            for one in written:
                one.result()
        finally:
            pool.shutdown(cancel_futures=True)
    if len(shards) > 1:
        weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        total = sum(_nbytes(spec) for spec in specs.values())
        values = {"metadata": {**index, "total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        atomic.write_file(folder / naming.index, json_text(values))


def json_text(values: Any) -> bytes:
    """JSON as it stands in the files of a folder.

    Raises:
        CheckpointError: something in it is nothing that JSON has.
    """
    try:
        text = json.dumps(values, indent=2, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"a file of JSON cannot hold what it was given: {error}") from None
    return encoded(f"{text}\n", "a file of JSON")


def _shards(specs: Specs, limit: int) -> list[list[str]]:
    """Tensors in their declared order, cut before the one that would exceed the limit."""
    if limit < 1:
        raise CheckpointError(f"shard_bytes must be at least 1, received {limit}")
    shards: list[list[str]] = [[]]
    room = limit
    for name, spec in specs.items():
        if shards[-1] and _nbytes(spec) > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= _nbytes(spec)
    return shards


def _nbytes(spec: TensorSpec) -> int:
    return spec.numel * (spec.dtype.itemsize if spec.dtype else 0)
