"""Checkpoints on a CUDA device: the same bits as on the CPU, straight to the device and back, and snapshots that hold still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_toys import LAYOUTS, raw, read_files, same_bits, small, state_dict, write_folder

from areno_fn import tree
from areno_fn.ckpt import hf
from areno_fn.ckpt.background import Writer
from areno_fn.ckpt.resume import latest, load_state, save_state
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.key import Key
from areno_fn.contracts.state import Counters, Cursor, TrainState

IDENTITY = RunIdentity(family="llama", model="a", phases="b", data="c", parameters="d", optimizers="e", seed=3)


def layout() -> Any:
    # larger than the pieces in which files are read
    return LAYOUTS["qwen3"](small(hidden_size=640, vocab_size=9000, qkv_bias=True, qk_norm=True), head_in_file=True)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["source", "float32", "bfloat16"])
def test_loading_to_the_device_gives_the_bits_of_loading_to_the_cpu(tmp_path: Path, shards: int, dtype: Any) -> None:
    iso = layout()
    folder = hf.open_folder(
        write_folder(tmp_path / "m", state_dict(iso, torch.bfloat16, norms=torch.float32), shards=shards)
    )
    on_cpu = hf.load(folder, iso, dtype=dtype)
    on_gpu = hf.load(folder, iso, dtype=dtype, device="cuda")
    assert all(leaf.is_cuda for leaf in on_gpu.values())
    assert same_bits(on_cpu, {name: leaf.cpu() for name, leaf in on_gpu.items()})


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 5_000_000])
def test_saving_from_the_device_writes_the_bits_of_the_source(tmp_path: Path, shard_bytes: int) -> None:
    iso = layout()
    tensors = state_dict(iso, torch.bfloat16, norms=torch.float32)
    folder = hf.open_folder(write_folder(tmp_path / "m", tensors))
    leaves = hf.load(folder, iso, device="cuda")
    hf.save(tmp_path / "out", leaves, iso, folder.config, source=folder, shard_bytes=shard_bytes)
    assert same_bits(read_files(tmp_path / "out")[0], tensors)


def state(fill: float) -> TrainState:
    """Parameters on the device, a transposed one and one on the CPU among them, and a snapshot that shares memory."""
    actor = {
        "w": torch.full((3000, 1000), fill, device="cuda"),
        "t": torch.arange(6.0, device="cuda").view(2, 3).t() + fill,
        "b": torch.full((7,), fill, dtype=torch.bfloat16, device="cuda"),
    }
    return TrainState(
        params={"actor": actor},
        optim={"actor": {"mu": torch.full((5,), fill)}},
        snapshots={"reference": dict(actor)},
        counters=Counters(optimizer_step=3),
        key=Key.of(1),
        cursor=Cursor(step=2),
    )


def copied(value: TrainState) -> TrainState:
    return tree.map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, value)


def test_a_state_written_behind_training_is_the_one_of_the_moment_it_was_saved(tmp_path: Path) -> None:
    live = state(1.0)
    kept = []
    with Writer(tmp_path, IDENTITY, keep=9) as writer:
        for step in range(5):
            kept.append(copied(live))
            writer.save(step, live)
            for leaf in tree.leaves(live):
                if isinstance(leaf, torch.Tensor):
                    leaf.mul_(3).add_(step)  # what a donated state allows
    for step, expected in enumerate(kept):
        loaded = load_state(tmp_path / f"step-{step:08d}", expected, IDENTITY)
        assert tree.first_difference(loaded, expected) is None
        assert loaded.params["actor"]["w"].is_cuda
        assert loaded.params["actor"]["w"].data_ptr() == loaded.snapshots["reference"]["w"].data_ptr()


def test_a_state_of_the_device_is_read_back_there(tmp_path: Path) -> None:
    saved = state(2.0)
    save_state(tmp_path, 4, saved, IDENTITY)
    found = latest(tmp_path)
    assert found is not None
    like = tree.map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, saved)
    loaded = load_state(found, like, IDENTITY, "cuda")
    assert all(leaf.is_cuda for leaf in tree.leaves(loaded) if isinstance(leaf, torch.Tensor))
    assert torch.equal(raw(loaded.params["actor"]["t"].cpu()), raw(saved.params["actor"]["t"].cpu()))
