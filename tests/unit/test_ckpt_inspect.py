"""`python -m areno_fn.ckpt inspect` and `verify`: what a checkpoint is said to be, and every planted damage found."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_toys import write_folder
from safetensors.torch import save_file
from unit.test_ckpt_resume import IDENTITY, state

from areno_fn.ckpt.peft import AdapterConfig, key_of, write_adapter
from areno_fn.ckpt.resume import save_state
from areno_fn.ckpt.tools.arguments import command
from areno_fn.command import main

CONFIG = {"model_type": "llama", "hidden_size": 2, "tie_word_embeddings": True, "text_config": {"num_hidden_layers": 7}}
TENSORS = {
    "model.embed_tokens.weight": torch.ones(3, 2, dtype=torch.bfloat16),
    "model.norm.weight": torch.ones(2),
    "model.steps": torch.tensor([1]),
}
INDEX = "model.safetensors.index.json"


def adapter(path: Path) -> Path:
    config = AdapterConfig(r=1, lora_alpha=3, target_modules=("up_proj",), base_model_name_or_path="base")
    tensors = {key_of("mlp.up_proj", "A"): torch.ones(1, 4), key_of("mlp.up_proj", "B"): torch.ones(2, 1)}
    return write_adapter(path, config, tensors)


def out(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    return command([str(argument) for argument in arguments]), capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code, text = out(capsys, "inspect", *arguments, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "a", TENSORS, CONFIG, shards=2)
    found = as_json(capsys, folder)
    assert (found["kind"], found["model_type"]) == ("Hugging Face folder", "llama")
    assert (found["tensors"], found["parameters"], found["bytes"]) == (3, 9, 28)
    assert found["dtypes"] == {
        "BF16": {"tensors": 1, "parameters": 6, "bytes": 12},
        "F32": {"tensors": 1, "parameters": 2, "bytes": 8},
        "I64": {"tensors": 1, "parameters": 1, "bytes": 8},
    }
    assert [(file["name"], file["tensors"]) for file in found["files"]] == [
        ("model-00001-of-00002.safetensors", 2),
        ("model-00002-of-00002.safetensors", 1),
    ]
    assert found["metadata"] == {"format": "pt"}
    assert found["index"] == {"total_size": 28}
    assert found["tied"] == "tied by the configuration, no lm_head in the files"
    assert found["config"] == {"hidden_size": 2, "num_hidden_layers": 7, "tie_word_embeddings": True}
    assert "table" not in found


def test_tensors_are_listed_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "a", TENSORS, CONFIG)
    row = {"name": "model.norm.weight", "dtype": "F32", "shape": [2], "bytes": 8, "file": "model.safetensors"}
    assert as_json(capsys, folder, "--pattern", "*norm*")["table"] == [row]
    assert len(as_json(capsys, folder, "--tensors")["table"]) == 3
    lines = out(capsys, "inspect", folder, "--tensors")[1].splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["dtype", "BF16", "F32", "I64"]
    assert "  F32        8  model.safetensors  [2]     model.norm.weight" in lines


def test_a_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_state(tmp_path, 12, state(), IDENTITY)
    found = as_json(capsys, folder)
    assert (found["kind"], found["step"]) == ("resumable state", 12)
    assert found["roles"] == ["actor (trained)", "critic (frozen)"]
    assert found["cursor"]["batch"] == 4
    assert found["counters"] == {"optimizer_step": 3, "rollout_iteration": 7, "data_epoch": 0}
    assert found["identity"]["family"] == "llama"
    assert {file["name"] for file in found["files"]} >= {"params.actor.safetensors", "optim.actor.safetensors"}
    text = out(capsys, "inspect", folder)[1]
    assert "  step          12\n" in text
    assert "  roles         actor (trained); critic (frozen)\n" in text


def test_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, adapter(tmp_path / "a"))
    assert (found["kind"], found["base"], found["modules"]) == ("PEFT adapter", "base", 1)
    assert found["ranks"] == ["1 of rank 1, alpha 3, scale 3"]
    assert found["targets"] == ["up_proj"]


def test_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    lines = out(capsys, "inspect", tmp_path / "a.safetensors")[1].splitlines()
    assert lines == [
        f"{tmp_path / 'a.safetensors'}: safetensors file",
        "  tensors       1, 2 elements (2), 8 B",
        "  dtype         F32: 1 tensor, 2 elements, 8 B",
        "  file          a.safetensors: 1 tensor, 72 B",
    ]


def test_a_folder_of_checkpoints_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = [save_state(tmp_path, step, state(), IDENTITY) for step in (1, 2)]
    assert main(command, ["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path} holds no checkpoint itself, but {newest[0]}, {newest[1]} do\n"
    )


def test_whole_checkpoints_have_no_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [
        write_folder(tmp_path / "one", TENSORS, CONFIG),
        write_folder(tmp_path / "two", TENSORS, CONFIG, shards=2),
        save_state(tmp_path / "states", 1, state(), IDENTITY),
        adapter(tmp_path / "adapter"),
        tmp_path / "one" / "model.safetensors",
    ]
    for place in places:
        code, text = out(capsys, "verify", place)
        assert (code, text[:3]) == (0, "OK "), text
    code, text = out(capsys, "verify", places[1], "--values")
    assert text == f"OK {places[1]}: 3 tensors in 2 files, every number finite.\n"


@pytest.mark.parametrize("shards", [1, 2])
def test_a_folder_of_diffusers_is_one_too(shards: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "a", TENSORS, {"_class_name": "Transformer"}, shards)
    for path in [*folder.glob("model*")]:
        named = path.rename(folder / path.name.replace("model", "diffusion_pytorch_model", 1))
        if named.suffix == ".json":
            named.write_text(named.read_text().replace('"model-0', '"diffusion_pytorch_model-0'))
    assert out(capsys, "verify", folder)[0] == 0
    assert as_json(capsys, folder)["tensors"] == 3
    assert out(capsys, "convert", folder, tmp_path / "b", "--shard-size", "1GB")[0] == 0
    assert (tmp_path / "b/diffusion_pytorch_model.safetensors").exists()
    assert out(capsys, "diff", folder, tmp_path / "b")[0] == 0


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-0000{number}-of-00002.safetensors"


def cut(folder: Path) -> None:
    for number in (1, 2):
        shard(folder, number).write_bytes(shard(folder, number).read_bytes()[:-1])


def move(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], shard(folder, 1).name) | {"ghost": shard(folder, 2).name}
    (folder / INDEX).write_text(json.dumps(index))


def miscount(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["total_size"] = 29
    (folder / INDEX).write_text(json.dumps(index))


def without_format(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(2)}, shard(folder, 2))


PLANTED: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "no config": (lambda f: (f / "config.json").unlink(), ("has no config.json",)),
    "no model type": (lambda f: (f / "config.json").write_text("{}"), ("has no model_type",)),
    "broken config": (lambda f: (f / "config.json").write_text("{"), ("config.json is not valid JSON",)),
    "a list": (lambda f: (f / "generation_config.json").write_text("[]"), ("generation_config.json holds a JSON list",)),
    "both short": (cut, ("00001-of-00002.safetensors is truncated", "00002-of-00002.safetensors is truncated")),
    "missing file": (lambda f: shard(f, 2).unlink(), ("files that are not there: model-00002-of-00002.safetensors (",)),
    "other places": (move, ("'ghost' should be in", "'model.norm.weight' should be in")),
    "total": (miscount, ("total_size is 29, its tensors have 28 bytes",)),
    "no format": (without_format, ("00002-of-00002.safetensors has no metadata 'format'",)),
    "two sets": (lambda f: save_file(TENSORS, f / "model.safetensors"), ("holds both",)),
    "stray": (lambda f: save_file(TENSORS, f / "x.safetensors"), ("x.safetensors is no part of the checkpoint",)),
    "index": (lambda f: (f / INDEX).write_text("{}"), ("needs a weight_map",)),
    "climbing": (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}})),
        ("must be a plain path inside the folder",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_damage_is_found(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "a", TENSORS, CONFIG, shards=2)
    plant, words = PLANTED[name]
    plant(folder)
    code, text = out(capsys, "verify", folder)
    assert code == 1
    assert all(word in text for word in words), text
    lines = text.splitlines()
    assert all(line.startswith("problem: ") for line in lines[:-1])
    assert lines[-1] == f"{folder}: {len(lines) - 1} problem{'s' * (len(lines) > 2)}."


def test_all_problems_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "a", TENSORS, CONFIG, shards=2)
    for name in ("no model type", "a list", "total", "no format", "stray"):
        PLANTED[name][0](folder)
    text = out(capsys, "verify", folder)[1]
    assert text.endswith(": 5 problems.\n"), text


def test_damaged_states_and_adapters_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_state(tmp_path / "s", 1, state(), IDENTITY)
    for name in ("params.actor.safetensors", "params.critic.safetensors"):
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(data)
    code, text = out(capsys, "verify", folder)
    assert (code, text.count("its SHA-256 is")) == (1, 2)
    broken = adapter(tmp_path / "a")
    (broken / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    code, text = out(capsys, "verify", broken)
    assert (code, "'r' is missing" in text) == (1, True)


def test_numbers_that_are_not_finite_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = torch.tensor([1.0, float("nan"), float("inf"), float("-inf")], dtype=torch.bfloat16)
    folder = write_folder(tmp_path / "a", {**TENSORS, "bad": bad}, CONFIG)
    assert out(capsys, "verify", folder)[0] == 0
    code, text = out(capsys, "verify", folder, "--values")
    assert code == 1
    assert text.splitlines()[0] == "problem: model.safetensors: 'bad' holds 1 NaN and 2 infinite of 4"


def test_hashes_are_those_of_sha256sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "a", TENSORS, CONFIG)
    lines = out(capsys, "verify", folder, "--hash")[1].splitlines()[:-1]
    expected = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("config.json", "model.safetensors")
    }
    assert lines == [f"{digest}  {name}" for name, digest in expected.items()]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.symlink_to("gone"), "cannot be read (No such file or directory)"),
        (os.mkfifo, "is not a regular file"),
    ],
    ids=["link", "pipe"],
)
def test_what_has_no_hash_is_named(
    make: Callable[[Path], object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "a", TENSORS, CONFIG)
    make(folder / "zzz")
    assert main(command, ["verify", str(folder), "--hash"]) == 2
    assert capsys.readouterr().err == f"error: {folder}/zzz {words}\n"


@pytest.mark.parametrize("words", [["verify", ""], ["inspect", ""], ["diff", "", ""]])
def test_the_empty_path_is_not_this_folder(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "a", TENSORS, CONFIG)
    monkeypatch.chdir(folder)
    assert main(command, words) == 2
    assert capsys.readouterr().err == "error: the empty path names no checkpoint; write . for this folder\n"
    assert main(command, ["convert", ".", ""]) == 2
    assert capsys.readouterr().err == "error: the empty path names no place to write to; choose a name\n"


@pytest.mark.parametrize("name", ["verify", "inspect"])
@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_what_is_no_checkpoint_is_code_2(
    name: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(command, [name, str(tmp_path / place)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / place} ")
