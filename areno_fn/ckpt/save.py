"""Writing a Hugging Face folder: the inverse of loading one, with everything the source had beside its weights."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from areno_fn import tree
from areno_fn.ckpt import atomic, disk
from areno_fn.ckpt.dtypes import DtypePolicy, converted
from areno_fn.ckpt.folder import CONFIG, GENERATION, HFFolder
from areno_fn.ckpt.paths import member, read_small
from areno_fn.ckpt.store import INDEX, SINGLE
from areno_fn.ckpt.tensorfile import write_tensors
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import Iso, ParamLayout, TensorSpec

_TEMPLATES = "additional_chat_templates"
_CARRIED = (
    GENERATION, "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.tiktoken",
    "*.model", "chat_template*", "processor_config.json", "preprocessor_config.json", "LICENSE*", "LICENCE*",
    "NOTICE*", "USE_POLICY*",
)  # fmt: skip
_WEIGHTS = (
    "*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.gguf", "*.h5",
    "*.msgpack", "*.onnx", "*.npz", "*.npy", "*.joblib",
)  # fmt: skip
_LONGEST_CARRIED = 1_000_000_000


def save(
    out: str | Path,
    params: Any,
    iso: Iso,
    config: Mapping[str, Any],
    *,
    source: HFFolder | None = None,
    dtype: DtypePolicy = "source",
    shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    without: Collection[str] = (),
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
        shard_bytes: most bytes of tensors in one file; a single file is written when all fit.
        metadata: more strings for the headers, beside those of `source`.
        files: further files by name; they win over carried ones.
        without: patterns of names that are not carried over from `source`.

    Returns:
        The folder.

    Raises:
        CheckpointError: the tensors are not those of `source`, `out` holds other things, or the disk refuses.
        LayoutError: the parameters are not what the layout takes.
    """
    leaves = dict(tree.leaves_with_path(params))
    back = iso.inverse
    ParamLayout(back.source).check(leaves, "the parameters")
    specs, fetch = _planned(back, leaves, source, dtype)
    return write_folder(
        out,
        specs,
        fetch,
        with_dtype(config, dtype),
        source=source,
        shard_bytes=shard_bytes,
        metadata=metadata,
        files=files,
        without=without,
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
) -> Path:
    """Writes a folder of tensors that are made one by one; the part of `save` that needs no layout.

    Args:
        specs: every tensor of the files, with its dtype.
        fetch: gives each tensor when its turn comes.
        out, config, source, shard_bytes, metadata, files, without: as for `save`.

    Returns:
        The folder.

    Raises:
        CheckpointError: a tensor is not what was declared, `out` holds other things, or the disk refuses.
    """
    others = {CONFIG: _json_text(config), **_carried(source, without), **(files or {})}
    _require_replaceable(Path(out), set(others))
    header = {**(source.store.metadata if source else {}), **(metadata or {}), "format": "pt"}
    index = dict(source.store.index_metadata or {}) if source else {}
    with atomic.folder(Path(out)) as scratch:
        _write_weights(scratch, specs, fetch, header, index, shard_bytes)
        _write_others(scratch, others)
    return Path(out)


def _planned(
    back: Iso, leaves: Mapping[str, torch.Tensor], source: HFFolder | None, policy: DtypePolicy
) -> tuple[dict[str, TensorSpec], Callable[[str], torch.Tensor]]:
    """The tensors of the file, and how each is made when its turn comes."""
    if source is not None:
        problems = ParamLayout(source.specs).differences(
            {
                name: TensorSpec(spec.shape, source.specs[name].dtype if name in source else None)
                for name, spec in back.target.items()
            }
        )
        if problems:
            raise CheckpointError(f"the layout does not write the tensors of {source.path}: {'; '.join(problems)}")
    maker = {name: part for part in back.parts for name in part.target}
    specs = {}
    for name, spec in back.target.items():
        own = leaves[maker[name].needs[name][0]].dtype
        kept = source.specs[name].dtype if source is not None and policy == "source" else own
        specs[name] = TensorSpec(spec.shape, converted(kept or own, policy))

    def fetch(name: str) -> torch.Tensor:
        return maker[name].apply(leaves)[name].to(specs[name].dtype)

    return specs, fetch


def _write_weights(
    scratch: Path,
    specs: Mapping[str, TensorSpec],
    fetch: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
    index: Mapping[str, Any],
    shard_bytes: int,
) -> None:
    shards = _shards(specs, shard_bytes)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE]
    for name, tensors in zip(names, shards, strict=True):
        write_tensors(scratch / name, {tensor: specs[tensor] for tensor in tensors}, fetch, metadata)
    if len(shards) > 1:
        weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        total = sum(_nbytes(spec) for spec in specs.values())
        values = {"metadata": {**index, "total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        atomic.write_file(scratch / INDEX, _json_text(values))


def _shards(specs: Mapping[str, TensorSpec], limit: int) -> list[list[str]]:
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


def _carried(source: HFFolder | None, without: Collection[str]) -> dict[str, bytes]:
    """The files of a source that belong to the model and are not weights."""
    if source is None:
        return {}
    here = [*source.path.iterdir(), *(source.path / _TEMPLATES).glob("*")]
    names = [path.relative_to(source.path).as_posix() for path in here if path.is_file()]
    kept = [name for name in sorted(names) if _is_carried(name) and not _matches(name, without)]
    return {name: read_small(member(source.path, name), _LONGEST_CARRIED) for name in kept}


def _is_carried(name: str) -> bool:
    within = (f"{_TEMPLATES}/*.jinja",) if "/" in name else _CARRIED
    return _matches(name, within) and not _matches(name, _WEIGHTS)


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _write_others(scratch: Path, others: Mapping[str, bytes]) -> None:
    folders = {(scratch / name).parent for name in others} - {scratch}
    for folder in folders:
        disk.make_folder(folder)
    for name, data in others.items():
        atomic.write_file(scratch / name, data)
    for folder in folders:
        disk.sync_folder(folder)


def _require_replaceable(out: Path, files: set[str]) -> None:
    """A folder is replaced as a whole, so it must hold nothing that would be lost."""
    if not out.is_dir():
        return
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        own = name in files or name in (CONFIG, SINGLE, INDEX, _TEMPLATES) or _is_carried(name)
        if not own and not fnmatch.fnmatchcase(name, "model-*-of-*.safetensors"):
            raise CheckpointError(f"{out} holds {name}, which would be lost; move it or write to another folder")


def with_dtype(config: Mapping[str, Any], policy: DtypePolicy) -> dict[str, Any]:
    """The contents of config.json for weights that a policy has converted."""
    if policy == "source":
        return dict(config)
    named = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    return {**config, **dict.fromkeys(named, policy)}


def _json_text(values: Any) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
