"""Low-rank adapters on disk, as PEFT writes and reads them.

A folder holds `adapter_config.json` and `adapter_model.safetensors` with two matrices for every adapted module:
A, [r, in], and B, [out, r]. The module computes with W + scale * B A. An adapter of a pipeline is beside them in the file that
diffusers reads, and a folder may hold that one alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import attrs
import torch

from areno_fn.ckpt import atomic
from areno_fn.ckpt.diffusers_lora import DIFFUSERS, as_peft, diffusers_key, diffusers_metadata
from areno_fn.ckpt.header import Header, read_header
from areno_fn.ckpt.jsontext import strict_json
from areno_fn.ckpt.paths import destination, member, read_small
from areno_fn.ckpt.peft_config import AdapterConfig, config_from_json, config_to_json
from areno_fn.ckpt.shards import json_text
from areno_fn.ckpt.tensorfile import Reader, write_tensors
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import TensorSpec, spec_of

__all__ = [
    "CONFIG",
    "DIFFUSERS",
    "WEIGHTS",
    "AdapterConfig",
    "AdapterFile",
    "AdapterFolder",
    "key_of",
    "open_adapter",
    "open_twin",
    "read_adapter",
    "write_adapter",
]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SIDES = {"A": ".lora_A.weight", "B": ".lora_B.weight"}
_LONGEST_CONFIG = 10_000_000


@attrs.frozen
class AdapterFile:
    """An adapter in memory.

    Attributes:
        config: what its configuration says.
        tensors: its matrices by the key that PEFT gives them (`key_of`).
    """

    config: AdapterConfig
    tensors: Mapping[str, torch.Tensor]


@attrs.frozen
class AdapterFolder:
    """An adapter on disk whose configuration and header have been read and checked.

    Attributes:
        path: the folder.
        config: what its configuration says.
        header: where its matrices are, by the keys that PEFT gives them.
        modules: the adapted modules, named as in the base model.
    """

    path: Path
    config: AdapterConfig
    header: Header
    modules: tuple[str, ...]


def key_of(module: str, side: str) -> str:
    """The key of one matrix, side "A" or "B", of a module that is named as in the base model."""
    return f"{_PREFIX}{module}{_SIDES[side]}"


def open_adapter(folder: str | Path) -> AdapterFolder:
    """Opens an adapter: configuration and header, but no byte of a matrix.

    Raises:
        CheckpointError: a file is missing or damaged; otherwise lists every field and tensor that cannot be used.
    """
    if "\0" in str(folder):
        raise CheckpointError(f"{str(folder)!r} holds a NUL character, which no path can; an adapter is needed")
    path = Path(folder)
    try:
        _require_files(path)
    except OSError as error:  # a name that is too long, or a folder that must not be entered
        raise CheckpointError(f"{path} cannot be opened ({error.strerror}); an adapter is needed") from error
    config, header = as_peft(read_header(member(path, DIFFUSERS))) if _is_diffusers(path) else _read_peft(path)
    modules = _modules(config, {name: entry.spec for name, entry in header.entries.items()}, str(header.path))
    return AdapterFolder(path, config, header, modules)


def open_twin(opened: AdapterFolder) -> AdapterFolder | None:
    """The same adapter in diffusers' file, which stands beside PEFT's; None where there is none, or it is what was opened.

    Raises:
        CheckpointError: it is damaged, or lists every tensor that cannot be used.
    """
    if opened.header.path.name == DIFFUSERS or not os.path.lexists(opened.path / DIFFUSERS):
        return None
    config, header = as_peft(read_header(member(opened.path, DIFFUSERS)))
    modules = _modules(config, {name: entry.spec for name, entry in header.entries.items()}, str(header.path))
    return AdapterFolder(opened.path, config, header, modules)


def read_adapter(folder: str | Path) -> AdapterFile:
    """Reads an adapter whole, with every matrix in the dtype that it has in the file.

    Raises:
        CheckpointError: as for `open_adapter`.
    """
    opened = open_adapter(folder)
    with Reader() as reader:
        return AdapterFile(opened.config, {name: reader.read(opened.header, name) for name in opened.header.entries})


def write_adapter(
    folder: str | Path, config: AdapterConfig, tensors: Mapping[str, torch.Tensor], part: str | None = None
) -> Path:
    """Writes an adapter that PEFT and `read_adapter` read. The folder appears whole, or the old one stays.

    Args:
        folder: where; an adapter that is there is replaced.
        config: what `adapter_config.json` will say.
        tensors: both matrices of every module by their PEFT keys, on any device and with any strides.
        part: the part of a pipeline that is adapted, as "transformer", so that diffusers' `load_lora_weights` reads the
            folder too, and `target_modules` are whole names; None where the model is no pipeline's.

    Returns:
        The folder.

    Raises:
        CheckpointError: lists every tensor that is none of an adapter with this configuration; or the folder holds
            something else, or the disk refuses.
    """
    path = destination(folder)
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    modules = _modules(config, specs, f"the adapter for {path}")
    if part is not None:  # an end such as "0", of to_out.0, would be that of whole blocks of a pipeline too
        config = attrs.evolve(config, target_modules=tuple(sorted(modules)))
    others = (
        sorted(inner.name for inner in path.iterdir() if inner.name not in (CONFIG, WEIGHTS, DIFFUSERS))
        if path.is_dir()
        else []
    )
    if others:
        raise CheckpointError(
            f"{path} holds {', '.join(others)}, which would be lost; move it or choose another folder"
        )
    text = json_text(config_to_json(config))
    with atomic.folder(path) as scratch:
        write_tensors(scratch / WEIGHTS, specs, tensors.__getitem__, {"format": "pt"})
        if part is not None:
            renamed = {diffusers_key(name, part): tensor for name, tensor in tensors.items()}
            shown = {name: spec_of(tensor) for name, tensor in renamed.items()}
            write_tensors(scratch / DIFFUSERS, shown, renamed.__getitem__, diffusers_metadata(config, part))
        atomic.write_file(scratch / CONFIG, text)
    return path


def _read_peft(path: Path) -> tuple[AdapterConfig, Header]:
    values = strict_json(read_small(member(path, CONFIG), _LONGEST_CONFIG), str(path / CONFIG))
    if not isinstance(values, dict):
        raise CheckpointError(f"{path / CONFIG} holds a JSON {type(values).__name__}, it must be an object")
    return config_from_json(values, str(path / CONFIG)), read_header(member(path, WEIGHTS))


def _is_diffusers(path: Path) -> bool:
    """Whether diffusers' file stands alone; beside PEFT's files, which hold the same, it is not read."""
    return (path / DIFFUSERS).exists() and not (path / CONFIG).exists() and not (path / WEIGHTS).exists()


def _require_files(path: Path) -> None:
    atomic.restore(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is {'not a folder' if path.exists() else 'not there'}; an adapter is needed")
    for name in () if _is_diffusers(path) else (CONFIG, WEIGHTS):
        if not (path / name).exists():
            raise CheckpointError(f"{path} has no {name}; {_why_none(path, name)}")


def _modules(config: AdapterConfig, specs: Mapping[str, TensorSpec], where: str) -> tuple[str, ...]:
    """The adapted modules, when the tensors are exactly the two matrices of each."""
    found: dict[str, dict[str, TensorSpec]] = {}
    problems = []
    for key, spec in specs.items():
        side = next((side for side, suffix in _SIDES.items() if key.endswith(suffix)), None)
        if side is None or not key.startswith(_PREFIX):
            problems.append(f"{key!r} is none of {_PREFIX}*{_SIDES['A']} and {_PREFIX}*{_SIDES['B']}")
        else:
            found.setdefault(key.removeprefix(_PREFIX).removesuffix(_SIDES[side]), {})[side] = spec
    for module, sides in found.items():
        problems += _module_problems(config, module, sides)
    if not specs:
        problems.append("there is no tensor in it")
    if problems:
        raise CheckpointError(f"{where} cannot be used: {'; '.join(problems)}")
    return tuple(found)


def _module_problems(config: AdapterConfig, module: str, sides: Mapping[str, TensorSpec]) -> list[str]:
    problems = [f"{key_of(module, side)!r} is missing" for side in _SIDES if side not in sides]
    rank = config.rank(module)
    for side, spec in sides.items():
        place = 0 if side == "A" else 1
        fits = len(spec.shape) == 2 and spec.shape[place] == rank
        if not fits or spec.dtype is None or not spec.dtype.is_floating_point:
            shape = f"[{rank}, in]" if side == "A" else f"[out, {rank}]"
            problems.append(f"{key_of(module, side)!r} is {spec}, it must be a floating {shape}")
    if not config.targets(module):
        problems.append(f"{module!r} is not among the target_modules {', '.join(config.target_modules)}")
    return problems


def _why_none(folder: Path, name: str) -> str:
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if name == WEIGHTS and others:
        return f"only safetensors are read, so convert {', '.join(others)} first"
    return "a folder that PEFT wrote, or save_lora_weights of diffusers, is needed"
