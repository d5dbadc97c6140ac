"""`inspect DIR`: what a checkpoint is, from its headers alone; as data, and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import attrs

from areno_fn.ckpt.header import DTYPE_NAMES
from areno_fn.ckpt.manifest import Manifest
from areno_fn.ckpt.peft import AdapterFolder
from areno_fn.ckpt.peft_config import config_to_json
from areno_fn.ckpt.tools.source import WORDS, Source
from areno_fn.ckpt.tools.text import amount, many, size, table
from areno_fn.ckpt.tools.ties import embedding_of, is_tied
from areno_fn.ckpt.words import brief
from areno_fn.contracts.errors import CheckpointError

_HIGHLIGHTS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "moe_intermediate_size", "num_experts", "num_experts_per_tok", "vocab_size", "max_position_embeddings",
    "sliding_window", "rope_theta", "rope_scaling", "rope_parameters", "layer_types", "tie_word_embeddings", "dtype",
    "torch_dtype", "quantization_config",
)  # fmt: skip


def described(source: Source, patterns: Collection[str] | None = None) -> dict[str, Any]:
    """What a checkpoint is, as plain data.

    Args:
        source: what `open_source` returned.
        patterns: list the tensors whose names match one of these, all for an empty list, none for None.

    Raises:
        CheckpointError: there are patterns, and no name matches.
    """
    specs = {name: source.entry(name).spec for name in source.files}
    found: dict[str, Any] = {
        "path": str(source.path),
        "kind": WORDS[source.kind],
        "tensors": len(specs),
        "parameters": sum(spec.numel for spec in specs.values()),
        "bytes": sum(source.entry(name).nbytes for name in specs),
        "dtypes": _dtypes(source),
        "files": [
            {"name": name, "bytes": header.size, "tensors": len(header.entries)}
            for name, header in source.headers.items()
        ],
        "metadata": {k: v for header in source.headers.values() for k, v in header.metadata.items()},
    }
    if source.kind == "folder":
        found |= _folder(source)
    if source.manifest is not None:
        found |= _state(source.manifest)
    if source.adapter is not None:
        found |= _adapter(source.adapter)
    if patterns is not None:
        found["table"] = _table(source, patterns)
        if patterns and not found["table"]:
            raise CheckpointError(f"no tensor of {source.path} matches {' or '.join(map(repr, patterns))}")
    return found


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The same as text."""
    rest = dict(found)
    yield f"{rest.pop('path')}: {rest.pop('kind')}"
    parameters = rest.pop("parameters")
    count, nbytes = rest.pop("tensors"), rest.pop("bytes")
    yield f"  tensors       {count}, {many(parameters, 'element')} ({amount(parameters)}), {size(nbytes)}"
    for name, one in rest.pop("dtypes").items():
        counts = f"{many(one['tensors'], 'tensor')}, {many(one['parameters'], 'element')}"
        yield f"  dtype         {name}: {counts}, {size(one['bytes'])}"
    rows = rest.pop("table", None)
    files = rest.pop("files")
    for name, value in rest.items():
        yield from _entry(name, value)
    for file in files:
        yield f"  file          {file['name']}: {many(file['tensors'], 'tensor')}, {size(file['bytes'])}"
    if rows is not None:
        yield from table(
            ("dtype", "bytes", "file", "shape", "tensor"),
            [(r["dtype"], str(r["bytes"]), r["file"], str(r["shape"]), r["name"]) for r in rows],
        )


def _entry(name: str, value: Any) -> Iterator[str]:
    if value is None or value in ({}, []):
        return
    label = name.replace("_", " ")
    if isinstance(value, Mapping):
        yield f"  {label}"
        for key, inner in value.items():
            if inner is None:
                continue
            yield f"    {key}: {_shown(inner)}"
    elif isinstance(value, list):
        yield f"  {label:<13} {'; '.join(map(_shown, value))}"
    else:
        yield f"  {label:<13} {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value if len(value) <= 200 else brief(value)
    return brief(value)


def _dtypes(source: Source) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for name in source.files:
        entry = source.entry(name)
        assert entry.spec.dtype is not None, "a tensor in a file has a dtype"
        one = found.setdefault(DTYPE_NAMES[entry.spec.dtype], {"tensors": 0, "parameters": 0, "bytes": 0})
        one["tensors"] += 1
        one["parameters"] += entry.spec.numel
        one["bytes"] += entry.nbytes
    return found


def _folder(source: Source) -> dict[str, Any]:
    config = source.config
    inner = config.get("text_config")
    fields = {**config, **inner} if isinstance(inner, Mapping) else config
    shown = {name: fields[name] for name in _HIGHLIGHTS if fields.get(name) is not None}
    if isinstance(shown.get("layer_types"), list):
        shown["layer_types"] = dict(Counter(map(str, shown["layer_types"])))
    index = source.store.index_metadata if source.store else None
    return {
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures"),
        "tied": _tied(source),
        "index": None if index is None else dict(index),
        "config": shown,
    }


def _tied(source: Source) -> str:
    heads = [name for name in source.files if embedding_of(name, source.files)]
    words = {
        True: "tied by the configuration",
        False: "not tied by the configuration",
        None: "not said to be tied or not",
    }
    there = f"{', '.join(heads)} in the files" if heads else "no lm_head in the files"
    return f"{words[is_tied(source.config)]}, {there}"


def _state(manifest: Manifest) -> dict[str, Any]:
    scalars = manifest.values.scalars
    return {
        "step": manifest.step,
        "roles": [
            f"{role.name} ({'trained' if role.trainable else 'frozen'}{'' if role.exported else ', not exported'})"
            for role in manifest.roles or ()
        ],
        "counters": _under("counters", scalars),
        "cursor": _under("cursor", scalars),
        "identity": attrs.asdict(manifest.identity),
        "aliases": dict(manifest.values.aliases),
    }


def _under(name: str, scalars: Mapping[str, Any]) -> dict[str, Any]:
    return {path.removeprefix(f"{name}."): value for path, value in scalars.items() if path.startswith(f"{name}.")}


def _adapter(adapter: AdapterFolder) -> dict[str, Any]:
    config = adapter.config
    kinds = Counter((config.rank(module), config.alpha(module), config.scale(module)) for module in adapter.modules)
    return {
        "base": config.base_model_name_or_path,
        "modules": len(adapter.modules),
        "ranks": [f"{n} of rank {r}, alpha {a:g}, scale {s:g}" for (r, a, s), n in kinds.most_common()],
        "targets": config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules),
        "config": config_to_json(config),
    }


def _table(source: Source, patterns: Collection[str]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "bytes": source.entry(name).nbytes,
            "file": source.files[name],
        }
        for name in sorted(source.files)
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
        for spec in [source.entry(name).spec]
        if spec.dtype is not None
    ]
