"""`laws.resume_exact` holds for a run with three roles and two optimizers, and catches what a checkpoint can forget."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import resume_toys as toys
import torch

from areno_fn import tree
from areno_fn.ckpt.header import read_header
from areno_fn.ckpt.manifest import read_manifest
from areno_fn.ckpt.resume import load_state, save_state
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.record import replace
from areno_fn.contracts.state import TrainState
from areno_fn.testing import laws
from areno_fn.testing.resume import Run

IDENTITY = RunIdentity(family="", model="", phases="", data="", parameters="", optimizers="", seed=0)


def test_K20_O9_D13_S5_three_roles_and_two_optimizers_continue_bit_for_bit() -> None:
    """Dropout, two schedules, moments, masters, an average, a reference, two epochs: cut at every step."""
    last = laws.resume_exact(toys.run())
    assert tree.equal(last, toys.after(toys.STEPS))
    assert (last.counters.optimizer_step, last.counters.data_epoch) == (2 * toys.STEPS, 2)


def test_the_toy_run_moves_everything_that_should_move() -> None:
    """Otherwise the law would say nothing about it."""
    first, last = toys.start(), toys.after(3)
    for role in ("actor", "critic", "teacher"):
        assert not tree.equal(first.params[role], last.params[role]), role
    assert not tree.equal(last.params["teacher"], last.params["actor"])
    masks = [toys.batch(toys.after(number)).kept for number in range(3)]
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


def test_O9_the_rates_after_resuming_are_those_of_the_step(tmp_path: Path) -> None:
    state = load_state(
        save_state(tmp_path, 3, toys.after(3), IDENTITY, roles=toys.ROLES), toys.start(), IDENTITY, roles=toys.ROLES
    )
    for number in range(4, 8):
        state, metrics = toys.step(state, toys.batch(state))
        assert metrics["train/lr"] == toys.ACTOR_RATE(number)
        assert metrics["critic/lr"] == toys.CRITIC_RATE(number)


def test_D13_every_row_is_read_once_an_epoch_for_every_cut(tmp_path: Path) -> None:
    """2 epochs x 9 batches, saved after each batch, and cut twice."""
    whole = read(toys.start(), {}, tmp_path)
    for epoch in (whole[:9], whole[9:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(18))
    for cut in range(17):
        assert read(toys.start(), {cut, cut + 1}, tmp_path) == whole, cut
    state, cursors = toys.start(), []
    for _ in range(10):
        state = toys.moved(state)
        cursors.append((state.cursor.epoch, state.cursor.batch))
    assert [cursors[number] for number in (0, 7, 8, 9)] == [(0, 1), (0, 8), (1, 0), (1, 1)]


def read(state: TrainState, cuts: set[int], folder: Path) -> list[list[int]]:
    """The rows of 18 batches of a run that is saved and loaded before some of them."""
    seen = []
    for number in range(18):
        if number in cuts:
            state = load_state(save_state(folder, number, state, IDENTITY), toys.start(), IDENTITY)
        seen.append(toys.rows_of(state))
        state = toys.moved(state)
    return seen


# ------------------------------------------------------------------------------------------------- what is caught


def broken(message: str, **changes: Any) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        laws.resume_exact(attrs.evolve(toys.run(4), **changes))


def test_an_average_outside_the_state_is_caught() -> None:
    hidden: dict[str, torch.Tensor] = {}

    def step(state: TrainState, batch: Any) -> Any:
        if not state.cursor.total:
            hidden["w"] = torch.zeros(toys.WIDTH)
        state, metrics = toys.step(state, batch)
        hidden["w"] = 0.5 * hidden["w"] + state.params["critic"]["v"]
        return replace(state, params={**state.params, "critic": {"v": hidden["w"].clone()}}), metrics

    broken(
        "stopped after step 1 and continued, the state after step 2: unlike the uninterrupted run at params.critic.v",
        step=step,
        start=toys.start,
    )


def test_noise_from_a_generator_is_caught() -> None:
    generator = torch.Generator().manual_seed(0)

    def batch(state: TrainState) -> toys.Rows:
        drawn = toys.batch(state)
        return replace(drawn, kept=(torch.rand(drawn.kept.shape, generator=generator) > 0.5).float())

    broken("saved on the way, the metrics of step 1", batch=batch)


def test_a_reader_with_a_place_of_its_own_is_caught() -> None:
    reader = iter(range(1000))

    def batch(state: TrainState) -> toys.Rows:
        drawn = toys.batch(state)
        return replace(drawn, inputs=drawn.inputs + next(reader))

    broken("everything that a step reads must be in the state", batch=batch)


def test_a_metric_alone_is_caught() -> None:
    calls = iter(range(1000))

    def step(state: TrainState, batch: Any) -> Any:
        state, metrics = toys.step(state, batch)
        return state, {**metrics, "train/loss": float(next(calls))}

    broken(
        "saved on the way, the metrics of step 1: unlike the uninterrupted run at train/loss: 0.0 against 4.0",
        step=step,
    )


def losing(change: Callable[[TrainState], TrainState]) -> Callable[..., TrainState]:
    """A `load_state` that forgets something."""

    def load(*args: Any, **kwargs: Any) -> TrainState:
        return change(load_state(*args, **kwargs))

    return load


def _no_moments(state: TrainState) -> TrainState:
    return replace(state, optim=toys.start().optim)


def _no_master(state: TrainState) -> TrainState:
    actor = state.optim["actor"]
    rounded = {path: leaf.bfloat16().float() for path, leaf in actor.master.items()}
    return replace(state, optim={**state.optim, "actor": replace(actor, master=rounded)})


FORGOTTEN: dict[str, tuple[Callable[[TrainState], TrainState], str]] = {
    "moments": (_no_moments, "optim.actor.master.w"),
    "masters": (_no_master, "optim.actor.master.w"),
    "teacher": (
        lambda state: replace(state, params={**state.params, "teacher": toys.start().params["teacher"]}),
        "params.teacher.w",
    ),
    "key": (lambda state: replace(state, key=state.key.advance()), "key.counter"),
    "cursor": (lambda state: replace(state, cursor=toys.start().cursor), "cursor.step"),
    "clock": (lambda state: replace(state, counters=toys.start().counters), "counters.optimizer_step"),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_a_checkpoint_that_forgets_is_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, path = FORGOTTEN[what]
    monkeypatch.setattr("areno_fn.testing.resume.load_state", losing(change))
    cut = 0 if what == "key" else 1
    with pytest.raises(AssertionError) as caught:
        laws.resume_exact(toys.run(4))
    assert f"what was saved and loaded after step {cut}: unlike the uninterrupted run at {path}" in str(caught.value)


def test_a_step_that_works_in_place_obeys_the_law() -> None:
    def step(state: TrainState, batch: Any) -> Any:
        moved, metrics = toys.step(state, batch)
        kept = moved.params["critic"]["v"].clone()
        for leaf in tree.leaves(state.params):
            leaf.zero_()
        return replace(moved, params={**moved.params, "critic": {"v": kept}}), metrics

    def start() -> TrainState:
        return replace(toys.start(), snapshots={})

    laws.resume_exact(Run(start=start, batch=toys.batch, step=step, steps=3))


def test_a_run_whose_state_changes_its_structure_says_how() -> None:
    def step(state: TrainState, batch: Any) -> Any:
        state, metrics = toys.step(state, batch)
        return replace(state, snapshots={}), metrics

    def like(steps: int) -> TrainState:
        return toys.start() if not steps else replace(toys.start(), snapshots={})

    laws.resume_exact(attrs.evolve(toys.run(3), step=step, like=like))


def test_cuts_are_chosen_and_checked() -> None:
    laws.resume_exact(toys.run(4), cuts=[2])
    with pytest.raises(ValueError, match="a run of 4 steps cannot be cut after step 5"):
        laws.resume_exact(toys.run(4), cuts=[5])


# ------------------------------------------------------------------------------------------------- roles


def test_S2_a_snapshot_is_what_it_was_when_the_parameters_have_moved(tmp_path: Path) -> None:
    """The reference begins as the actor itself; in the file of a later step it is the actor of the start."""
    first = save_state(tmp_path, 0, toys.start(), IDENTITY)
    assert not (first / "snapshots.reference.safetensors").exists()
    assert read_manifest(first).values.aliases["snapshots.reference.w"] == "params.actor.w"
    later = load_state(save_state(tmp_path, 5, toys.after(5), IDENTITY), toys.start(), IDENTITY)
    assert tree.equal(later.snapshots["reference"], toys.start().params["actor"])
    assert not tree.equal(later.params["actor"], toys.start().params["actor"])
    kept = load_state(first, toys.start(), IDENTITY)
    moved, _ = toys.step(kept, toys.batch(kept))
    assert tree.equal(kept.params["actor"], toys.start().params["actor"])
    assert tree.equal(moved.snapshots["reference"], toys.start().params["actor"])


def test_S3_an_update_of_one_role_leaves_the_other_and_its_file_alone(tmp_path: Path) -> None:
    """Two roles from one start: after an update of one, the other's file is the same byte for byte."""
    state = toys.start()
    critic = tree.map(torch.clone, state.params["actor"])
    optim = {**state.optim, "critic": toys.actor_optimizer().init(critic)}
    state = replace(state, params={"actor": state.params["actor"], "critic": critic}, optim=optim, snapshots={})
    before = save_state(tmp_path, 0, state, IDENTITY)
    update = toys.train_step(toys.actor_loss, toys.actor_optimizer(), role="critic")
    moved, _ = update(state, [toys.Rows(rows=torch.arange(2), inputs=torch.ones(2, 6), kept=torch.ones(2, 6))])
    after = save_state(tmp_path, 1, moved, IDENTITY)
    assert not read_manifest(before).values.aliases and not read_manifest(after).values.aliases
    for name in ("params.actor.safetensors", "optim.actor.safetensors"):
        assert (before / name).read_bytes() == (after / name).read_bytes()
    for name in ("params.critic.safetensors", "optim.critic.safetensors"):
        assert (before / name).read_bytes() != (after / name).read_bytes()
        assert set(read_header(after / name).entries) == set(read_header(before / name).entries)
    loaded = load_state(after, state, IDENTITY)
    loaded.params["critic"]["w"].zero_()
    assert tree.equal(loaded.params["actor"], state.params["actor"])


def test_K19_files_of_frozen_parts_stay_and_those_of_trained_ones_change(tmp_path: Path) -> None:
    first = save_state(tmp_path, 0, replace(toys.start(), snapshots={}), IDENTITY)
    frozen = replace(toys.after(1), snapshots={})
    frozen = replace(frozen, params={**frozen.params, "teacher": toys.start().params["teacher"]})
    second = save_state(tmp_path, 1, frozen, IDENTITY)
    changed = {path.name for path in first.iterdir() if path.read_bytes() != (second / path.name).read_bytes()}
    assert changed == {
        "manifest.msgpack", "params.actor.safetensors", "params.critic.safetensors", "optim.actor.safetensors",
        "optim.critic.safetensors",
    }  # fmt: skip
    for file in read_manifest(second).files:
        assert file.tensors, file.name


def test_a_manifest_says_who_owns_what(tmp_path: Path) -> None:
    manifest = read_manifest(save_state(tmp_path, 0, toys.start(), IDENTITY, roles=toys.ROLES))
    assert manifest.roles == toys.ROLES.roles
    assert {role: sorted(map(str, kept)) for role, kept in manifest.optimizers.items()} == {
        "actor": [
            "inner.0.norm", "inner.1.count", "inner.1.mu.b", "inner.1.mu.w", "inner.1.nu.b", "inner.1.nu.w",
            "inner.3.count", "inner.3.rate", "master.w",
        ],
        "critic": ["inner.0.norm", "inner.1.count", "inner.1.rate"],
    }  # fmt: skip
    assert str(manifest.optimizers["actor"]["master.w"]) == "float32 [6]"


@pytest.mark.parametrize("steps", [0, -1])
def test_a_run_of_no_steps_is_no_pass(steps: int) -> None:
    with pytest.raises(ValueError, match=rf"a run of {steps} steps never goes on, so that nothing would be compared"):
        laws.resume_exact(toys.run(steps))
