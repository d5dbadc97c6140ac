"""Which files beside the weights belong to a model, and go where it goes.

Tokenizer, chat templates, configurations of processors, generation, licence. Not the README: it describes the
source, its training and its results, which are no longer true. Not subfolders other than that of chat templates.
Python files only where the configuration names classes in them (`auto_map`); they are copied, never run.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from areno_fn.ckpt.folder import CONFIG, GENERATION, HFFolder
from areno_fn.ckpt.naming import NAMINGS
from areno_fn.ckpt.paths import member, read_small
from areno_fn.contracts.errors import CheckpointError

_TEMPLATES = "additional_chat_templates"
_CARRIED = (
    GENERATION, "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.tiktoken",
    "*.model", "chat_template*", "*processor_config.json", "audio_tokenizer_config.json", "LICENSE*", "LICENCE*",
    "NOTICE*", "USE_POLICY*",
)  # fmt: skip
_WEIGHTS = (
    "*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.gguf", "*.h5",
    "*.msgpack", "*.onnx", "*.npz", "*.npy", "*.joblib", "*.py",
)  # fmt: skip
_LONGEST_CARRIED = 200_000_000


def carried(source: HFFolder | None, without: Collection[str]) -> dict[str, bytes]:
    """The files of a source that belong to the model and are not weights, by name.

    Raises:
        CheckpointError: one of them cannot be read, or is a link that leaves the folder.
    """
    if source is None:
        return {}
    here = [*source.path.iterdir(), *(source.path / _TEMPLATES).glob("*")]
    names = [path.relative_to(source.path).as_posix() for path in here if os.path.isfile(path)]
    code = ("*.py",) if "auto_map" in source.config else ()
    kept = [name for name in sorted(names) if _is_carried(name) or _matches(name, code)]
    return {
        name: read_small(member(source.path, name), _LONGEST_CARRIED) for name in kept if not _matches(name, without)
    }


def require_replaceable(out: Path, files: set[str]) -> None:
    """A folder is replaced as a whole, so it must hold nothing that would be lost.

    Args:
        out: the folder, if it is there.
        files: what will be written beside the weights.

    Raises:
        CheckpointError: names the first thing that would be.
    """
    if not out.is_dir():
        return
    named = files | {parent.as_posix() for name in files for parent in PurePosixPath(name).parents}
    weights = [name for naming in NAMINGS for name in (naming.single, naming.index, naming.pattern)]
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        own = name in named or name in (CONFIG, _TEMPLATES) or _is_carried(name)
        if not own and not _matches(name, weights):
            raise CheckpointError(f"{out} holds {name}, which would be lost; move it or write to another folder")


def _is_carried(name: str) -> bool:
    within = (f"{_TEMPLATES}/*.jinja",) if "/" in name else _CARRIED
    return _matches(name, within) and not _matches(name, _WEIGHTS)


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
