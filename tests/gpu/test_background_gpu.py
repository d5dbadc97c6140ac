"""Saving a state that lies on a GPU: the copy is right, page-locked, taken once, and apart from what comes after."""

from __future__ import annotations

from pathlib import Path

import resume_toys as toys
import torch

from areno_fn import tree
from areno_fn.ckpt.background import Writer
from areno_fn.ckpt.resume import load_state
from areno_fn.ckpt.snapshot import HostMemory
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.record import replace
from areno_fn.contracts.state import Cursor

IDENTITY = RunIdentity(family="", model="", phases="", data="", parameters="", optimizers="", seed=0)
MATRIX = 4096


def test_a_copy_holds_what_was_there_though_the_gpu_goes_on_writing() -> None:
    """Work is queued before the copy, which must wait for it, and after it, which must not be seen."""
    memory = HostMemory()
    value = torch.zeros(MATRIX, MATRIX, device="cuda")
    factor = torch.full((MATRIX, MATRIX), 1e-4, device="cuda")
    places = set()
    for number in range(1, 6):
        for _ in range(8):
            factor = (factor @ factor).clamp(1e-4, 1e-4)
        value.fill_(number)
        copies = memory.copy({"value": value, "turned": value.t()[:7], "host": torch.tensor(number)})
        value.fill_(-1)
        assert bool((copies["value"] == number).all()) and bool((copies["turned"] == number).all())
        assert int(copies["host"]) == number
        assert copies["value"].is_pinned() and not copies["host"].is_pinned()
        places.add(copies["value"].data_ptr())
    assert len(places) == 1


def test_a_state_on_the_gpu_is_saved_as_it_was_and_comes_back_where_it_was(tmp_path: Path) -> None:
    state = replace(toys.start(width=10_000), key=toys.start().key)
    on_gpu = tree.map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, state)
    on_gpu = replace(on_gpu, key=state.key)
    with Writer(tmp_path, IDENTITY, roles=toys.ROLES, keep=9) as writer:
        for step in range(1, 5):
            on_gpu.params["critic"]["v"].fill_(step)
            writer.save(step, replace(on_gpu, cursor=Cursor(step=step)))
    like = tree.map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) and leaf.is_cuda else leaf, on_gpu)
    for step in range(1, 5):
        back = load_state(tmp_path / f"step-{step:08d}", like, IDENTITY, "cuda", roles=toys.ROLES)
        assert back.params["critic"]["v"].is_cuda and bool((back.params["critic"]["v"] == step).all())
        assert not back.key.seed.is_cuda and tree.equal(back.params["actor"], state.params["actor"])
