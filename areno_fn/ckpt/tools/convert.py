"""`convert SRC OUT`: a Hugging Face folder written anew, in another dtype, in other shards, with an adapter merged in.

No model family is needed: names and shapes stay as they are. One tensor is in memory at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch

from areno_fn.ckpt.dtypes import DtypePolicy, converted
from areno_fn.ckpt.folder import HFFolder, open_folder
from areno_fn.ckpt.paths import destination
from areno_fn.ckpt.peft import AdapterFolder, key_of, open_adapter
from areno_fn.ckpt.save import with_dtype, write_folder
from areno_fn.ckpt.tensorfile import Reader
from areno_fn.ckpt.tools.ties import embedding_of, is_tied
from areno_fn.contracts.adapter import Adapted
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import TensorSpec
from areno_fn.kernels.merge import merged

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def convert(
    source: str | Path,
    out: str | Path,
    *,
    dtype: DtypePolicy = "source",
    shard_bytes: int = 5_000_000_000,
    adapter: str | Path | None = None,
) -> Path:
    """Writes a folder anew. It appears whole, or what was there stays.

    Args:
        source: a Hugging Face folder.
        out: another folder; a Hugging Face folder that is there is replaced.
        dtype: what floating tensors become; "source" keeps each one's own.
        shard_bytes: most bytes of tensors in one file.
        adapter: a PEFT adapter; W + scale * B A is computed in float32 and rounded once, to the dtype written.

    Raises:
        CheckpointError: something is damaged, the adapter does not fit (lists every module), weights are quantised,
            `out` holds other things or is or lies in what is read, or the disk refuses.
    """
    folder = open_folder(source)
    target = destination(out)
    if target.exists() and target.samefile(source):
        raise CheckpointError(f"{out} is the folder that is read; write to another one")
    opened = None if adapter is None else open_adapter(adapter)
    for read in (source, *([] if adapter is None else [adapter])):
        if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(read)):
            raise CheckpointError(f"{out} is in {read}, which is read; write to a folder outside")
    modules = {} if opened is None else adapted_weights(folder, opened)
    if dtype != "source":
        packed = [n for n, s in folder.specs.items() if s.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
        _require_plain(folder, packed, "converted")
    specs = {n: TensorSpec(s.shape, converted(s.dtype or torch.float32, dtype)) for n, s in folder.specs.items()}
    with Reader() as reader:
        fetch = _fetcher(reader, folder, specs, opened, modules)
        return write_folder(
            target, specs, fetch, with_dtype(folder.config, dtype), source=folder, shard_bytes=shard_bytes
        )


def adapted_weights(folder: HFFolder, adapter: AdapterFolder) -> dict[str, str]:
    """The adapted module of every weight that an adapter changes, by the name of the weight.

    Raises:
        CheckpointError: lists every module that is not there, has another shape, is tied, or is quantised.
    """
    weights = {f"{module}.weight": module for module in adapter.modules}
    problems = [problem for name, module in weights.items() for problem in _misfits(folder, adapter, name, module)]
    if problems:
        raise CheckpointError(f"{adapter.path} is no adapter of {folder.path}: {'; '.join(problems)}")
    _require_plain(folder, [name for name in weights if folder.specs[name].dtype not in _PLAIN], "merged into")
    return weights


def bytes_of(text: str) -> int:
    """The number of bytes that `5GB`, `512MiB` or `1000` names.

    Raises:
        CheckpointError: it names none, or less than 1.
    """
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kKMGT]?i?B?)", text)
    unit = found[2].upper() if found else "?"
    count = int(float(found[1]) * _UNITS[unit]) if found and unit in _UNITS else 0
    if count < 1:
        raise CheckpointError(f"{text!r} is no size of a file; write for example 5GB, 512MiB or 1000000")
    return count


def _misfits(folder: HFFolder, adapter: AdapterFolder, name: str, module: str) -> Iterator[str]:
    entries = adapter.header.entries
    rows, columns = entries[key_of(module, "B")].spec.shape[0], entries[key_of(module, "A")].spec.shape[1]
    wanted = (columns, rows) if adapter.config.fan_in_fan_out else (rows, columns)
    embedding = embedding_of(name, folder.specs) if is_tied(folder.config) else None
    if embedding is not None:
        yield f"{module!r} is tied to {embedding!r}, which the adapter does not change"
    elif name not in folder:
        yield f"there is no module {module!r}"
    elif folder.specs[name].shape != wanted:
        yield f"{module!r} is {list(folder.specs[name].shape)}, the adapter is for {list(wanted)}"


def _require_plain(folder: HFFolder, odd: Collection[str], what: str) -> None:
    """Packed numbers mean nothing without their scales, which only the code that packed them can apply."""
    if folder.config.get("quantization_config") is not None:
        raise CheckpointError(f"{folder.path} is quantised by its configuration; only plain weights can be {what}")
    if odd:
        shown = ", ".join(f"{name!r} {folder.specs[name]}" for name in odd)
        raise CheckpointError(f"{folder.path} has weights that are not plain and cannot be {what}: {shown}")


def _fetcher(
    reader: Reader,
    folder: HFFolder,
    specs: Mapping[str, TensorSpec],
    adapter: AdapterFolder | None,
    modules: Mapping[str, str],
) -> Callable[[str], torch.Tensor]:
    def fetch(name: str) -> torch.Tensor:
        weight = reader.read(folder.store.header(name), name)
        dtype = specs[name].dtype
        if adapter is not None and name in modules:
            changed, what = _merged(weight, reader, adapter, modules[name], dtype), f"{name!r} with the adapter"
        elif weight.dtype == dtype:
            return weight
        else:
            changed, what = weight.to(dtype), repr(name)
        if bool(weight.isfinite().all()) and not bool(changed.isfinite().all()):
            raise CheckpointError(f"{what} holds numbers beyond {dtype}; write with another --dtype")
        return changed

    return fetch


def _merged(
    weight: torch.Tensor, reader: Reader, adapter: AdapterFolder, module: str, dtype: torch.dtype | None
) -> torch.Tensor:
    a, b = (reader.read(adapter.header, key_of(module, side)) for side in "AB")
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    turned = adapter.config.fan_in_fan_out
    scaled = b.to(wide) * adapter.config.scale(module)
    whole = Adapted(weight=weight.t() if turned else weight, a=a.to(wide), b=scaled)
    result = merged(whole, dtype)
    return result.t() if turned else result
