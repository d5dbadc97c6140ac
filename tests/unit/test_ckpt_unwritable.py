"""What could not be read again is not written: names, strings and files that the formats cannot hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typeguard import suppress_type_checks

from areno_fn.ckpt.folder import open_folder
from areno_fn.ckpt.save import write_folder
from areno_fn.ckpt.trees import load_tree, save_tree
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import spec_of

WEIGHT = torch.arange(6.0).reshape(2, 3)
HALF = "a\ud800"


def write(out: Path | str, name: str = "w", config: Any = None, **options: Any) -> Path:
    return write_folder(out, {name: spec_of(WEIGHT)}, lambda _: WEIGHT, {} if config is None else config, **options)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"__metadata__": WEIGHT}, "a tensor cannot be named '__metadata__', where the format keeps its metadata"),
        ({HALF: WEIGHT}, r"the path of a leaf would hold 'a\\ud800', which is no valid text"),
        ({"text": HALF}, r"'text' would hold 'a\\ud800', which is no valid text"),
    ],
)
def test_a_tree_that_could_not_be_read_again_is_not_written(tmp_path: Path, tree: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        save_tree(tmp_path / "tree.safetensors", tree)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "__metadata__"}, "cannot be named '__metadata__'"),
        ({"name": HALF}, "the header of a file would hold"),
        ({"metadata": {"made": HALF}}, "the header of a file would hold"),
        ({"config": {"made": {1}}}, "Object of type set is not JSON serializable"),
        ({"config": {"made": HALF}}, "a file of JSON would hold"),
        ({"files": {"../beside/it": b""}}, "the name '../beside/it' must be a plain path inside the folder"),
        ({"files": {"/there": b""}}, "the name '/there' must be a plain path inside the folder"),
        ({"files": {"a\0": b""}}, r"the name 'a\\x00' must be a plain path inside the folder"),
        ({"files": {"": b""}}, "the name '' must be a plain path inside the folder"),
        ({"files": {"config.json": b"1"}}, "'config.json' is the name of a file that is written anyway"),
        ({"files": {"model.safetensors": b""}}, "'model.safetensors' is the name of a file that is written anyway"),
    ],
)
def test_a_folder_that_could_not_be_read_again_is_not_written(tmp_path: Path, options: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        write(tmp_path / "out", **options)
    assert not any(tmp_path.iterdir())


def test_metadata_that_is_no_text_is_not_written(tmp_path: Path) -> None:
    with suppress_type_checks(), pytest.raises(CheckpointError, match="strings to strings, received 'made': 3"):
        write(tmp_path / "out", metadata={"made": 3})
    assert not any(tmp_path.iterdir())


def test_files_in_folders_of_folders_are_written_and_replaced(tmp_path: Path) -> None:
    for data in (b"1", b"2"):
        write(tmp_path / "out", files={"a/b/c.json": data, "a/d.json": data})
    assert (tmp_path / "out/a/b/c.json").read_bytes() == b"2"
    assert list(open_folder(tmp_path / "out").specs) == ["w"]


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_a_name_that_no_file_system_takes_is_a_sentence(tmp_path: Path, name: str) -> None:
    for writing in (lambda path: save_tree(path, {"w": WEIGHT}), write):
        with pytest.raises(CheckpointError, match="choose another name"):
            writing(tmp_path / name)


def test_odd_names_that_can_be_held_come_back(tmp_path: Path) -> None:
    tree = {
        name: WEIGHT + place for place, name in enumerate(["../x", "/", "A", "a", "ü中😀", "\0\n", "k" * 5000, "%"])
    }
    save_tree(tmp_path / "tree.safetensors", tree)
    back = load_tree(tmp_path / "tree.safetensors", tree)
    assert all(torch.equal(back[name], tree[name]) for name in tree)
