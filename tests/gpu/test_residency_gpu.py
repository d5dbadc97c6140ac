"""Moves between a CUDA device and page-locked memory, and phases whose snapshots stay away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import tiny

from areno_fn import tree
from areno_fn.ckpt.resume import save_state
from areno_fn.contracts.batch import JudgedRollout
from areno_fn.contracts.record import replace
from areno_fn.contracts.state import TrainState
from areno_fn.engine import specfile
from areno_fn.engine.plan import Plan, plan
from areno_fn.engine.residency import offload, onload
from areno_fn.engine.start import initial_state, resumed_state
from areno_fn.engine.text_medium import pad_prompts
from areno_fn.steps.recipes import ACTOR, REFERENCE
from areno_fn.steps.variants import AVERAGE

pytestmark = pytest.mark.gpu

KEPT = ['phases.grpo.ema={"decay": 0.9}', "phases.grpo.algorithm.minibatches=1", 'device="cuda"']
AWAY = 'phases.grpo.offload=["reference", "ema"]'


def leaves() -> dict[str, Any]:
    """NaNs with payloads, strides, tied and overlapping leaves, an empty one."""
    odd = torch.tensor([0x7FC12345, 0x7F812345, -0x003EDCBB, -0x80000000, 1], dtype=torch.int64)
    whole = torch.arange(24, device="cuda", dtype=torch.bfloat16).reshape(4, 6)
    return {
        "odd": odd.to(torch.int32).view(torch.float32).cuda(),
        "whole": whole,
        "tied": whole,
        "rows": whole[1:4:2],
        "turned": whole.T,
        "empty": torch.empty(0, 3, device="cuda"),
        "bytes": torch.arange(7, device="cuda", dtype=torch.uint8),
    }


def test_there_and_back_is_exact_and_keeps_what_is_shared() -> None:
    given = leaves()
    away = offload(given)
    assert all(leaf.is_cpu for leaf in tree.leaves(away)) and away["whole"].is_pinned() and away["odd"].is_pinned()
    back = onload(away, "cuda")
    for made in (away, back):
        assert tree.equal(given, made)
        assert {name: leaf.stride() for name, leaf in made.items()} == {
            name: leaf.stride() for name, leaf in given.items()
        }
    back["whole"][1, 0] = 99.0
    assert back["tied"][1, 0] == back["rows"][0, 0] == back["turned"][0, 1] == 99.0
    assert given["whole"][1, 0] != 99.0 and away["whole"][1, 0] != 99.0


def test_a_move_waits_for_what_makes_its_source_and_not_for_what_comes_later() -> None:
    made = torch.ones(2048, 2048, device="cuda")
    for _ in range(50):
        made = made @ made / 2048
    away = offload({"w": made})
    made.zero_()
    assert torch.equal(away["w"], torch.ones(2048, 2048))
    back = onload(away, "cuda")
    away["w"].zero_()
    assert torch.equal(back["w"].cpu(), torch.ones(2048, 2048))


def test_what_is_away_takes_no_memory_of_the_device() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    kept = {"w": torch.ones(1 << 24, device="cuda")}
    assert torch.cuda.memory_allocated() - before >= 1 << 26
    kept = offload(kept)
    assert torch.cuda.memory_allocated() == before
    assert float(onload(kept, "cuda")["w"].sum()) == 1 << 24
    assert torch.cuda.memory_allocated() == before


def ready(folder: Path, *more: str) -> tuple[Plan, TrainState]:
    """The tiny run at the beginning of its second phase."""
    made = plan(specfile.read(str(tiny.write_spec(folder)), [*KEPT, *more]))
    state = initial_state(made)
    state = replace(state, cursor=replace(state.cursor, phase=1))
    return made, made.phases[1].algorithm.begin(state)


def stepped(made: Plan, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
    phase = made.phases[1]
    assert phase.algorithm.sample is not None and phase.prompts is not None
    rollout = phase.algorithm.sample(state, pad_prompts(phase.prompts, range(4), made.device))
    moved = {**state.params, ACTOR: tree.map(lambda leaf: leaf * 1.01, state.params[ACTOR])}
    batch = JudgedRollout(rollout=rollout, rewards=(rollout.tokens % 5).sum(1).float())
    after, metrics = phase.algorithm.step(replace(state, params=moved), batch)
    return after, dict(metrics)


def test_losses_are_the_same_bits_with_snapshots_away(tmp_path: Path) -> None:
    beside, start = ready(tmp_path / "beside")
    away, other = ready(tmp_path / "away", AWAY)
    for name in (REFERENCE, AVERAGE):
        assert all(leaf.is_cuda for leaf in tree.leaves(start.snapshots[name]))
        assert all(leaf.is_cpu and leaf.is_pinned() for leaf in tree.leaves(other.snapshots[name]))
    assert tree.equal(start, other)
    _, expected = stepped(beside, start)
    after, received = stepped(away, other)
    assert received["train/kl"] > 0
    for name in ("train/loss", "train/policy_loss", "train/kl", "train/entropy"):
        assert received[name] == expected[name]
    assert all(leaf.is_cpu and leaf.is_pinned() for leaf in tree.leaves(after.snapshots))
    assert not tree.equal(after.snapshots[AVERAGE], other.snapshots[AVERAGE])
    assert tree.equal(after.snapshots[REFERENCE], other.snapshots[REFERENCE])


def test_what_was_away_is_away_again_in_a_run_that_goes_on(tmp_path: Path) -> None:
    made, state = ready(tmp_path / "run", AWAY)
    state = replace(state, cursor=replace(state.cursor, step=1, total=1))
    folder = save_state(tmp_path / "states", 1, state, made.identity, roles=made.roles)
    back = resumed_state(made, folder)
    assert tree.equal(back, state)
    assert all(leaf.is_cpu and leaf.is_pinned() for leaf in tree.leaves(back.snapshots))
    assert all(leaf.is_cuda for leaf in tree.leaves(back.params))


@pytest.mark.parametrize("finetune", ['"full"', '{"kind": "lora", "merge_rollouts": true}'], ids=["full", "merged"])
def test_a_run_with_snapshots_away_ends_and_goes_on(tmp_path: Path, finetune: str) -> None:
    spec = tiny.write_spec(tmp_path)
    changes = [word for change in (*KEPT, AWAY, f"finetune={finetune}") for word in ("--set", change)]
    out = ["--out", str(tmp_path / "out")]
    first = tiny.in_process([str(spec), *out, *changes, "--set", "phases.grpo.steps=2"])
    assert (first.code, first.err) == (0, "")
    last = tiny.in_process([str(spec), *out, *changes, "--resume"])
    assert (last.code, last.err) == (0, "")
    assert (tmp_path / "out/export_ema/config.json").exists()
