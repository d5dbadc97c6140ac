"""Writes cut at every operation, at every byte count, by a full disk, and by kill -9: the old or the new, whole."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_toys import LAYOUTS, same_bits, small, state_dict

from areno_fn import tree
from areno_fn.ckpt import atomic, disk, hf
from areno_fn.ckpt.resume import latest, load_state, save_state
from areno_fn.ckpt.trees import load_tree, save_tree
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.key import Key
from areno_fn.contracts.state import Counters, Cursor, TrainState

OPERATIONS = [
    "make_folder",
    "create",
    "write",
    "sync",
    "sync_folder",
    "rename",
    "exchange",
    "remove_file",
    "remove_folder",
]
IDENTITY = RunIdentity(family="f", model="m", phases="p", data="d", parameters="p", optimizers="o", seed=0)
ISO = LAYOUTS["llama"](small(num_layers=1), head_in_file=False)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk adds nothing where the machine does not crash; that it is asked for is tested below."""
    monkeypatch.setattr(disk, "sync", lambda _: None)
    monkeypatch.setattr(disk, "sync_folder", lambda _: None)


class Death(BaseException):
    """The process is gone: nothing catches it, and nothing is done after it."""


class Disk:
    """Counts the operations of `disk`, and dies, or fails, at one of them."""

    def __init__(
        self, patch: pytest.MonkeyPatch, at: int | None = None, error: OSError | None = None, *, exchange: bool = True
    ) -> None:
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.at, self.error, self.dead = at, error, False
        for name in OPERATIONS:
            patch.setattr(disk, name, self.wrapped(name, getattr(disk, name)))
        if not exchange:
            patch.setattr(disk, "exchange", lambda *_: False)

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any) -> Any:
            if self.dead:
                raise Death
            self.log.append((name, args))
            if self.at is not None and len(self.log) > self.at:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                if self.error is not None:
                    self.at = None
                    raise self.error
                self.dead = True
                raise Death
            return real(*args)

        return operation


def params(number: int) -> dict[str, torch.Tensor]:
    return ISO(state_dict(ISO, seed=number))


def state(number: int) -> TrainState:
    return TrainState(
        params={"actor": params(number)},
        optim={"actor": {"count": number}},
        snapshots={},
        counters=Counters(optimizer_step=number),
        key=Key.of(number),
        cursor=Cursor(step=number),
    )


# What each kind of write does, and which version it left: `write(root, n)` and `read(root) -> n`.


def write_export(root: Path, number: int) -> None:
    files = {"tokenizer.json": str(number).encode(), "additional_chat_templates/a.jinja": str(number).encode()}
    hf.save(root / "export", params(number), ISO, {"version": number}, shard_bytes=1500, files=files)


def read_export(root: Path) -> int:
    folder = hf.open_folder(root / "export")
    number = folder.config["version"]
    assert same_bits(hf.load(folder, ISO), params(number))
    for name in ("tokenizer.json", "additional_chat_templates/a.jinja"):
        assert (folder.path / name).read_text() == str(number)
    return number


def write_step(keep: int) -> Callable[[Path, int], None]:
    def write(root: Path, number: int) -> None:
        save_state(root / "states", number, state(number), IDENTITY, keep)

    return write


def write_same_step(root: Path, number: int) -> None:
    save_state(root / "states", 0, state(number), IDENTITY, 1)


def read_state(root: Path) -> int:
    path = latest(root / "states")
    assert path is not None
    loaded = load_state(path, state(0), IDENTITY)
    number = loaded.cursor.step
    assert tree.first_difference(loaded, state(number)) is None
    return number


def write_tree(root: Path, number: int) -> None:
    save_tree(root / "tree", {"n": number, "params": params(number)})


def read_tree(root: Path) -> int:
    value = load_tree(root / "tree", {"n": 0, "params": params(0)})
    assert same_bits(value["params"], params(value["n"]))
    return value["n"]


KINDS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], int]]] = {
    "export": (write_export, read_export),
    "K17 state, keep 1": (write_step(1), read_state),
    "K16 state, keep 2": (write_step(2), read_state),
    "state under its own number": (write_same_step, read_state),
    "tree": (write_tree, read_tree),
}


def count_operations(write: Callable[[Path, int], None], root: Path, exchange: bool) -> int:
    root.mkdir()
    for number in (0, 1):
        write(root, number)
    with pytest.MonkeyPatch.context() as patch:
        counted = Disk(patch, exchange=exchange)
        write(root, 2)
    return len(counted.log)


def leftovers(root: Path) -> list[str]:
    return [p.name for p in root.rglob(".*")]


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_K16_K17_death_at_every_operation(kind: str, exchange: bool, tmp_path: Path) -> None:
    """Half of a `write` gets through, then nothing does; afterwards the old or the new one is whole."""
    write, read = KINDS[kind]
    seen = set()
    operations = count_operations(write, tmp_path / "count", exchange)
    assert operations > 8
    for at in range(operations):
        root = tmp_path / str(at)
        root.mkdir()
        for number in (0, 1):
            write(root, number)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, at, exchange=exchange)
            with pytest.raises(Death):
                write(root, 2)
        seen.add(read(root))
        write(root, 3)
        assert read(root) == 3 and not leftovers(root)
    assert seen == {1, 2}


@pytest.mark.parametrize("kind", KINDS)
def test_K16_death_at_every_operation_of_a_first_write(kind: str, tmp_path: Path) -> None:
    write, read = KINDS[kind]
    at = 0
    while True:
        root = tmp_path / str(at)
        root.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            watched = Disk(patch, at)
            try:
                write(root, 1)
                break
            except Death:
                pass
        named = [p for p in root.rglob("*") if not any(part.startswith(".") for part in p.relative_to(root).parts)]
        if any(p.is_file() for p in named):  # it has its name, so it is whole
            assert read(root) == 1
        write(root, 2)
        assert read(root) == 2 and not leftovers(root)
        at += 1
    assert at == len(watched.log) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_refuses(kind: str, tmp_path: Path) -> None:
    """One operation fails with an error: a sentence, and the old one stays, or the new one is in place."""
    write, read = KINDS[kind]
    for at in range(count_operations(write, tmp_path / "count", True)):
        root = tmp_path / str(at)
        root.mkdir()
        code = (errno.ENOSPC, errno.EIO)[at % 2]
        for number in (0, 1):
            write(root, number)
        with pytest.MonkeyPatch.context() as patch:
            watched = Disk(patch, at, OSError(code, os.strerror(code)))
            try:
                write(root, 2)
                assert read(root) == 2
            except CheckpointError as error:
                assert os.strerror(code) in str(error) and str(root) in str(error) and "\n" not in str(error)
        assert watched.at is None
        assert read(root) in (1, 2)
        write(root, 3)
        assert read(root) == 3 and not leftovers(root)


@pytest.mark.parametrize("kind", KINDS)
def test_the_disk_has_everything_before_the_name_changes(kind: str, tmp_path: Path) -> None:
    """Every file is synced after its last write, every folder after its last name, then comes the rename."""
    write, _ = KINDS[kind]
    with pytest.MonkeyPatch.context() as patch:
        log = Disk(patch).log
        write(tmp_path, 1)
    unsynced: set[Any] = set()
    paths: list[Path] = []
    for name, args in log:
        if name in ("create", "make_folder"):
            unsynced.add(args[0].parent)
            paths.append(args[0])
        elif name == "write":
            unsynced.add(args[0])
        elif name in ("sync", "sync_folder"):
            unsynced.discard(args[0])
        elif name == "rename":
            scratch = args[0] if args[0].name.startswith(".") else args[0].parent
            assert unsynced <= {scratch.parent}
            unsynced.add(args[1].parent)
    renames = [place for place, (name, _) in enumerate(log) if name == "rename"]
    assert len(renames) == 1 and log[renames[0] + 1][0] == "sync_folder"
    assert len(paths) > 1


def test_K17_the_old_state_goes_only_after_the_new_one_has_its_name(tmp_path: Path) -> None:
    write = write_step(1)
    write(tmp_path, 0)
    with pytest.MonkeyPatch.context() as patch:
        log = Disk(patch).log
        write(tmp_path, 1)
    renames = [(source.name, target.name) for name, (source, target) in [e for e in log if e[0] == "rename"]]
    assert renames[0][1] == "step-00000001" and renames[1][0] == "step-00000000"
    place = [name for name, _ in log].index("rename")
    assert not any(name.startswith("remove") for name, _ in log[:place] if name != "remove_file")


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    write_export(tmp_path, 0)

    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), atomic.folder(tmp_path / "export") as scratch:
        atomic.write_file(scratch / "config.json", b"{}")
        interrupt("now")
    assert read_export(tmp_path) == 0 and not leftovers(tmp_path)


def test_a_living_writer_is_not_swept_away(tmp_path: Path) -> None:
    """Two processes that write one folder: the second neither removes nor uses what the first is writing."""
    with atomic.folder(tmp_path / "a") as scratch:
        atomic.write_file(scratch / "first", b"1")
        other = scratch.with_name(".a.writing-1")
        os.mkdir(other)  # left by a dead one
        atomic.sweep(tmp_path, "a")
        assert not other.exists() and (scratch / "first").exists()
        with pytest.raises(CheckpointError, match="a could not be written"), atomic.folder(tmp_path / "a"):
            pass
    assert (tmp_path / "a" / "first").read_bytes() == b"1"


def test_names_with_pattern_characters(tmp_path: Path) -> None:
    (tmp_path / ".x.writing-1").mkdir()
    with atomic.folder(tmp_path / "[x]*?") as scratch:
        atomic.write_file(scratch / "a", b"1")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".x.writing-1", "[x]*?"]


def test_a_replacement_without_exchange_is_taken_back_by_a_reader(tmp_path: Path) -> None:
    """Where the system cannot exchange two names, a crash can leave the old folder aside for a moment."""
    write_export(tmp_path, 0)
    (tmp_path / "export").rename(tmp_path / ".export.replaced")
    assert read_export(tmp_path) == 0
    save_state(tmp_path / "states", 4, state(4), IDENTITY)
    (tmp_path / "states" / "step-00000004").rename(tmp_path / "states" / ".step-00000004.replaced")
    assert read_state(tmp_path) == 4


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        hf.save(tmp_path / "file" / "export", params(0), ISO, {})
    with pytest.raises(CheckpointError, match="could not be written"):
        save_state(tmp_path / "file", 0, state(0), IDENTITY)


KILLED = """
    import os, signal, sys, time
    from pathlib import Path
    sys.path[:0] = [{tests!r}, {unit!r}]
    import test_ckpt_crash as t
    root, rounds = Path(sys.argv[1]), int(sys.argv[2])
    for write, number in ((t.write_export, 0), (t.write_step(1), 0), (t.write_tree, 0)):
        write(root, number)
    for turn in range(rounds):
        told, tell = os.pipe()
        child = os.fork()
        if not child:
            number = max(t.read_export(root), t.read_state(root), t.read_tree(root)) + 1
            while True:
                for write in (t.write_export, t.write_step(1), t.write_tree):
                    write(root, number)
                    os.write(tell, b".")
                number += 1
        for _ in range(3 + turn % 3):
            os.read(told, 1)
        time.sleep(0.0005 * turn)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)
        print(t.read_export(root), t.read_state(root), t.read_tree(root), flush=True)
    t.write_export(root, 10**6)
    t.write_step(1)(root, 10**6)
    t.write_tree(root, 10**6)
    assert not t.leftovers(root)
"""


def test_K16_kill_9(tmp_path: Path) -> None:
    """A writer that is killed at twenty moments: what is there always loads, and never goes back."""
    unit = Path(__file__).parent
    script = textwrap.dedent(KILLED).format(tests=str(unit.parent), unit=str(unit))
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path), "20"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=unit.parents[1])
    assert result.returncode == 0, result.stderr
    lines = [[int(n) for n in line.split()] for line in result.stdout.splitlines()]
    assert len(lines) == 20 and all(max(line) - min(line) <= 1 for line in lines)
    assert all(new >= old for one, two in itertools.pairwise(lines) for old, new in zip(one, two, strict=True))
    assert min(lines[-1]) >= 19
