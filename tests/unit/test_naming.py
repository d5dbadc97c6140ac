"""Folders of diffusers: the same weights, the same index, another word before the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ckpt_toys import read_files, same_bits
from safetensors.torch import save_file

from areno_fn.ckpt.folder import open_folder
from areno_fn.ckpt.load import load
from areno_fn.ckpt.naming import DIFFUSERS, TRANSFORMERS
from areno_fn.ckpt.save import save
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import identity, spec_of

CONFIG = {"_class_name": "Toy2DModel"}
TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b.c": torch.ones(4, dtype=torch.bfloat16), "d": torch.zeros(5)}
LAYOUT = identity({name: spec_of(tensor) for name, tensor in TENSORS.items()})
SINGLE = "diffusion_pytorch_model.safetensors"
INDEX = "diffusion_pytorch_model.safetensors.index.json"
SEVERAL = [f"diffusion_pytorch_model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_names_of_diffusers() -> None:
    assert (DIFFUSERS.single, DIFFUSERS.index, DIFFUSERS.files(1), DIFFUSERS.files(3)) == (
        SINGLE,
        INDEX,
        [SINGLE],
        SEVERAL,
    )
    assert TRANSFORMERS.files(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_a_folder_of_one_file_is_read_and_written_under_its_names(tmp_path: Path) -> None:
    source = tmp_path / "transformer"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS, source / SINGLE, metadata={"format": "pt"})
    opened = open_folder(source)
    assert opened.store.naming == DIFFUSERS
    out = save(tmp_path / "out", load(opened, LAYOUT), LAYOUT, opened.config, source=opened)
    assert names(out) == ["config.json", SINGLE]
    assert same_bits(read_files(out)[0], TENSORS)


def test_a_folder_of_several_files_is_read_and_written_under_its_names(tmp_path: Path) -> None:
    first = save(tmp_path / "first", TENSORS, LAYOUT, CONFIG, naming=DIFFUSERS, shard_bytes=25)
    assert names(first) == sorted(["config.json", INDEX, *SEVERAL])
    assert json.loads((first / INDEX).read_text())["weight_map"] == dict(zip(TENSORS, SEVERAL, strict=True))
    opened = open_folder(first)
    again = save(tmp_path / "again", load(opened, LAYOUT), LAYOUT, CONFIG, source=opened, shard_bytes=25)
    assert names(again) == names(first)
    assert same_bits(read_files(again)[0], TENSORS)
    renamed = save(tmp_path / "renamed", TENSORS, LAYOUT, CONFIG, source=opened, naming=TRANSFORMERS)
    assert names(renamed) == ["config.json", "model.safetensors"]


def test_a_folder_under_either_naming_is_replaced_whole(tmp_path: Path) -> None:
    out = save(tmp_path / "out", TENSORS, LAYOUT, CONFIG, naming=DIFFUSERS, shard_bytes=25)
    save(out, TENSORS, LAYOUT, CONFIG)
    assert names(out) == ["config.json", "model.safetensors"]
    save(out, TENSORS, LAYOUT, CONFIG, naming=DIFFUSERS)
    assert names(out) == ["config.json", SINGLE]


def test_two_sets_of_weights_are_refused_whatever_they_are_called(tmp_path: Path) -> None:
    out = save(tmp_path / "out", TENSORS, LAYOUT, CONFIG, naming=DIFFUSERS)
    (out / "model.safetensors").write_bytes((out / SINGLE).read_bytes())
    with pytest.raises(CheckpointError, match=f"holds both model.safetensors and {SINGLE}; remove the one"):
        open_folder(out)
    (out / "model.safetensors").unlink()
    (out / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match=f"holds both {SINGLE} and {INDEX}; remove the one"):
        open_folder(out)
