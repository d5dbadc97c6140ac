"""Saving while training goes on: what is written is what was saved, nothing is lost, and no thread stays."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areno_fn import tree
from areno_fn.ckpt import disk
from areno_fn.ckpt.background import Writer
from areno_fn.ckpt.resume import latest, load_state, save_state
from areno_fn.ckpt.snapshot import HostMemory
from areno_fn.contracts.errors import CheckpointError, RecordError
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.roles import Role, RoleLayout
from areno_fn.contracts.state import Counters, Cursor, TrainState

IDENTITY = RunIdentity(family="f", model="m", phases="p", data="d", parameters="q", optimizers="o", seed=0)


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def state(number: int = 0) -> TrainState:
    actor = {"w": torch.full((64, 3), float(number)), "b": torch.full((5,), number, dtype=torch.bfloat16)}
    return TrainState(
        params={"actor": actor},
        optim={"actor": {"mu": torch.full((64, 3), number / 2), "count": torch.tensor(number)}},
        snapshots={"reference": {"w": actor["w"]}},
        counters=Counters(optimizer_step=number),
        key=Key.of(7),
        cursor=Cursor(step=number),
    )


def read(root: Path) -> TrainState:
    path = latest(root)
    assert path is not None
    return load_state(path, state(), IDENTITY)


class Gate:
    """Holds the first operation of every write until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, error: OSError | None = None) -> None:
        self.reached, self.opened, self.error = threading.Event(), threading.Event(), error
        make = disk.make_folder

        def held(path: Path) -> None:
            self.reached.set()
            assert self.opened.wait(60)
            if self.error is not None:
                raise self.error
            make(path)

        patch.setattr(disk, "make_folder", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def test_what_was_saved_is_written_though_it_is_overwritten_meanwhile(gate: Gate, tmp_path: Path) -> None:
    with Writer(tmp_path, IDENTITY) as writer:
        value = state(3)
        writer.save(3, value)
        assert gate.reached.wait(60)
        for leaf in tree.leaves(value):
            if isinstance(leaf, torch.Tensor):
                leaf.zero_()
        gate.opened.set()
    back = read(tmp_path)
    assert tree.first_difference(back, state(3)) is None
    assert back.snapshots["reference"]["w"] is back.params["actor"]["w"]


def test_the_file_is_that_of_a_save_in_the_foreground(tmp_path: Path) -> None:
    one = save_state(tmp_path / "one", 3, state(3), IDENTITY)
    with Writer(tmp_path / "other", IDENTITY) as writer:
        writer.save(3, state(3))
    for path in one.iterdir():
        assert path.read_bytes() == (tmp_path / "other" / one.name / path.name).read_bytes()


def test_a_second_save_waits_for_the_first(gate: Gate, tmp_path: Path) -> None:
    order: list[str] = []
    with Writer(tmp_path, IDENTITY) as writer:
        writer.save(1, state(1))
        assert gate.reached.wait(60)

        def release() -> None:
            order.append("first whole")
            gate.opened.set()

        timer = threading.Timer(0.05, release)
        timer.start()
        writer.save(2, state(2))
        order.append("second begun")
        timer.join()
    assert order == ["first whole", "second begun"]
    assert read(tmp_path).cursor.step == 2


def test_the_newest_k_stay(tmp_path: Path) -> None:
    with Writer(tmp_path, IDENTITY, keep=2) as writer:
        for step in range(5):
            writer.save(step, state(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_step_that_works_in_place_gives_the_states_it_had(tmp_path: Path) -> None:
    """One buffer, written over and over: every checkpoint is that of its step."""
    value = state(0)
    with Writer(tmp_path, IDENTITY, keep=99) as writer:
        for step in range(1, 9):
            for leaf, new in zip(tree.leaves(value.params), tree.leaves(state(step).params), strict=True):
                leaf.copy_(new)
            writer.save(step, replace(value, cursor=Cursor(step=step)))
    for step in range(1, 9):
        loaded = load_state(tmp_path / f"step-{step:08d}", state(), IDENTITY)
        assert tree.equal(loaded.params, state(step).params)


# ------------------------------------------------------------------------------------------------- failures

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, data: memoryview) -> int:
        raise FULL

    monkeypatch.setattr(disk, "write", refuse)


def test_a_write_that_failed_is_reported_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError) as caught, Writer(tmp_path, IDENTITY) as writer:
        writer.save(1, state(1))
        writer.wait()
        full(monkeypatch)
        writer.save(2, state(2))
        writer.save(3, state(3))
        pytest.fail("the second save went on")
    place = tmp_path / "step-00000002"
    assert str(caught.value) == (
        f"{place} could not be written (No space left on device); what was there before is untouched"
    )
    assert tree.equal(read(tmp_path), state(1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_write_that_failed_is_reported_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch)
    with pytest.raises(CheckpointError, match="No space left on device"), Writer(tmp_path, IDENTITY) as writer:
        writer.save(1, state(1))


def test_neither_of_two_failures_hides_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch)
    with pytest.raises(ZeroDivisionError) as caught, Writer(tmp_path, IDENTITY) as writer:
        writer.save(1, state(1))
        raise ZeroDivisionError
    (note,) = caught.value.__notes__
    assert "No space left on device" in note
    with pytest.raises(CheckpointError), Writer(tmp_path, IDENTITY) as writer:
        writer.save(1, state(1))
        raise KeyboardInterrupt


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_however_a_run_ends_its_last_state_is_whole(error: type[BaseException], gate: Gate, tmp_path: Path) -> None:
    timer = threading.Timer(0.05, gate.opened.set)
    with pytest.raises(error), Writer(tmp_path, IDENTITY) as writer:
        writer.save(1, state(1))
        timer.start()
        raise error
    timer.join()
    assert tree.equal(read(tmp_path), state(1))


def test_an_interruption_while_waiting_gives_the_write_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Writer(tmp_path, IDENTITY) as writer:
        writer.save(1, state(1))
        writer.wait()
        make = disk.make_folder

        def hangs(path: Path) -> None:
            assert writer._given_up.wait(60)
            make(path)

        monkeypatch.setattr(disk, "make_folder", hangs)
        writer.save(2, state(2))
        assert writer.is_writing
        monkeypatch.setattr("areno_fn.ckpt.background.futures.wait", interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert not writer.is_writing


def test_a_mistake_in_the_library_is_no_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(disk, "write", broken)
    with pytest.raises(ZeroDivisionError), Writer(tmp_path, IDENTITY) as writer:
        writer.save(1, state(1))
        writer.save(2, state(2))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (replace(state(), optim={"actor": {"x": min}}), "only tensors, ints"),
        (replace(state(), params={"actor": torch.ones(1, dtype=torch.complex64)}), "cannot be stored"),
        (replace(state(), params={"actor": torch.ones(1, device="meta")}), "on meta, which cannot be stored"),
    ],
)
def test_what_cannot_be_stored_is_refused_at_once(value: TrainState, words: str, tmp_path: Path) -> None:
    with Writer(tmp_path, IDENTITY) as writer:
        with pytest.raises(CheckpointError, match=words):
            writer.save(1, value)
        writer.save(2, state(2))
    assert tree.equal(read(tmp_path), state(2))


def test_S3_roles_that_share_memory_are_not_saved(tmp_path: Path) -> None:
    roles = RoleLayout(roles=(Role(name="actor"), Role(name="critic")))
    shared = state().params["actor"]
    with (
        Writer(tmp_path, IDENTITY, roles=roles) as writer,
        pytest.raises(RecordError, match=r"actor\.w and critic\.w share storage; copy one of them"),
    ):
        writer.save(1, replace(state(), params={"actor": shared, "critic": dict(shared)}))
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------- memory


def many() -> dict[str, torch.Tensor]:
    return {
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "every other": torch.arange(9)[::2],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(True),
        "expanded": torch.ones(1).expand(4),
        "bytes": torch.arange(200, dtype=torch.uint8),
        "small": torch.ones(3, dtype=torch.bfloat16),
    }


def test_copies_are_equal_contiguous_and_apart() -> None:
    copies = HostMemory().copy(many())
    for name, tensor in many().items():
        assert torch.equal(copies[name], tensor) and copies[name].is_contiguous()
        assert copies[name].data_ptr() % 64 == 0
    for tensor in copies.values():
        tensor.zero_()
    assert torch.equal(copies["bytes"], torch.zeros(200, dtype=torch.uint8))
    again = HostMemory().copy({"a": torch.ones(3, requires_grad=True)})
    assert not again["a"].requires_grad


def test_memory_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areno_fn.ckpt.snapshot._BLOCK", 128)
    memory = HostMemory()
    first = memory.copy(many())
    places, taken = {name: copy.data_ptr() for name, copy in first.items()}, memory.nbytes
    assert {name: copy.data_ptr() for name, copy in memory.copy(many()).items()} == places
    assert memory.nbytes == taken
    for number in range(3):  # fewer, and then all again, as when a phase has a reference and the next has none
        memory.copy({name: copy for name, copy in many().items() if number % 2})
        assert all(torch.equal(copy, many()[name]) for name, copy in memory.copy(many()).items())
    assert memory.nbytes == taken


def test_memory_that_was_reserved_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areno_fn.ckpt.snapshot._BLOCK", 128)
    memory = HostMemory()
    memory.reserve([tensor.numel() * tensor.itemsize for tensor in many().values()], [])
    taken = memory.nbytes
    copies = memory.copy(many())
    assert all(torch.equal(copy, many()[name]) for name, copy in copies.items()) and memory.nbytes == taken > 0


def test_a_writer_reserves_for_states_whose_parts_have_come_apart(tmp_path: Path) -> None:
    """The reference begins as the actor's own tensors; after a step it has tensors of its own."""
    with Writer(tmp_path, IDENTITY) as writer:
        writer.reserve(state(1))
        apart = replace(state(2), snapshots={"reference": {"w": torch.ones(64, 3)}})
        writer.save(1, apart)
        taken = writer._memory.nbytes
        writer.save(2, apart)
        assert writer._memory.nbytes == taken
    loaded = load_state(tmp_path / "step-00000002", apart, IDENTITY)
    assert tree.equal(loaded, apart)


def test_reserving_that_fails_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RuntimeError, match="not enough memory"), Writer(tmp_path, IDENTITY) as writer:
        writer.reserve(state(1))
        writer.save(1, state(1))


def test_blocks_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areno_fn.ckpt.snapshot._BLOCK", 256)
    tensors = {str(size): torch.full((size,), size % 251, dtype=torch.uint8) for size in range(0, 400, 7)}
    copies = HostMemory().copy(tensors)
    assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())
