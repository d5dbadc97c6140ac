"""Whether the library did right by a checkpoint that may be damaged.

Either it refuses with a sentence, or every leaf has, bit for bit, what the safetensors library and a plain reading of
the index find in the files. Nothing outside the folder is opened.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from ckpt_toys import same_bits
from faults.checkpoint_folders import LAYOUT

from areno_fn import tree
from areno_fn.ckpt import hf
from areno_fn.ckpt.store import INDEX, SINGLE
from areno_fn.contracts.errors import CheckpointError, LayoutError, ModelError

LONGEST_SENTENCE = 20_000


class Watch:
    """Every path that is opened or listed while it is on. There is one for a process: hooks cannot be taken back."""

    _only: Watch | None = None

    def __new__(cls) -> Watch:
        if cls._only is None:
            cls._only = super().__new__(cls)
            cls._only.on, cls._only.seen = False, []
            sys.addaudithook(cls._only._hook)
        return cls._only

    on: bool
    seen: list[str]

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if (
            self.on
            and event in ("open", "os.listdir", "os.scandir")
            and isinstance(arguments[0], str | bytes | os.PathLike)
        ):
            self.seen.append(os.fsdecode(arguments[0]))

    def outside(self, folder: Path) -> list[str]:
        """What was opened that is neither in the folder nor part of Python."""
        home = os.path.realpath(folder)
        allowed = (home, os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix), os.path.realpath(_PROJECT))
        real = (os.path.realpath(path) for path in self.seen)
        return [path for path in real if not any(path == root or path.startswith(root + os.sep) for root in allowed)]


_PROJECT = Path(__file__).parents[2] / "areno_fn"


def judged(folder: Path) -> str:
    """What became of loading a folder: "accepted" or the name of the error.

    Raises:
        AssertionError: the sentence is none, something was read outside, or what was loaded is not in the files.
    """
    watch = Watch()
    watch.seen.clear()
    watch.on = True
    try:
        loaded = _loaded(folder)
    except (CheckpointError, LayoutError, ModelError) as error:
        text = str(error)
        assert text and "\n" not in text and len(text) < LONGEST_SENTENCE, f"no sentence: {text[:500]!r}"
        text.encode("utf-8")
        outcome = type(error).__name__
    else:
        outcome = "accepted"
    finally:
        watch.on = False
    assert not watch.outside(folder), f"read outside the folder: {watch.outside(folder)}"
    if outcome == "accepted":
        expected = LAYOUT(_expected(folder))
        assert same_bits(loaded, expected), "what was loaded is not what is in the files"
    return outcome


def _loaded(folder: Path) -> dict[str, torch.Tensor]:
    from areno_fn.models import family_of

    opened = hf.open_folder(folder)
    family = family_of(opened.config)
    config = family.config_from_hf(opened.config)
    layout = family.layout(config, head_in_file="lm_head.weight" in opened)
    return dict(tree.leaves_with_path(hf.load(opened, layout, like=family.shapes(config), threads=2)))


def _expected(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / SINGLE).exists():
        assert not (folder / INDEX).exists(), "two sets of weights"
        return safetensors.torch.load((folder / SINGLE).read_bytes())
    weight_map = json.loads((folder / INDEX).read_bytes(), object_pairs_hook=_without_repetition)["weight_map"]
    files = {file: safetensors.torch.load((folder / file).read_bytes()) for file in set(weight_map.values())}
    held = [name for tensors in files.values() for name in tensors]
    assert sorted(held) == sorted(weight_map), "the files do not hold exactly what the index names"
    return {name: files[file][name] for name, file in weight_map.items()}


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({name for name, _ in pairs}) == len(pairs), "a name stands twice, so the file has two meanings"
    return dict(pairs)
