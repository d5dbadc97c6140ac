"""Saves that are cut off, processes that are killed, and disks that are full: what was saved before always loads.

    python tests/e2e/crash.py cuts                 a save cut at every 64 KiB and at every operation on the disk
    python tests/e2e/crash.py kills [COUNT] [SEED] a process that trains and saves without end, killed with SIGKILL
    python tests/e2e/crash.py full                 a run on a disk with room for one checkpoint and a half

Each prints what it did and ends with a line of figures; the exit code is 1 when something was lost.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import resume_toys as toys
from e2e import tiny
from e2e.faulty_disk import Fault, FaultyDisk, Stopped

from areno_fn import tree
from areno_fn.ckpt.background import Writer
from areno_fn.ckpt.resume import latest, load_state
from areno_fn.ckpt.verify import state_problems
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.state import TrainState

IDENTITY = RunIdentity(family="", model="", phases="", data="", parameters="", optimizers="", seed=0)


class Trajectory:
    """The state after any number of steps, as the step function gives it."""

    def __init__(self, width: int) -> None:
        self.start = toys.start(width=width)
        self._states = {0: self.start}

    def at(self, step: int) -> TrainState:
        """The state after `step` steps; made from the nearest one that is known."""
        if step not in self._states:
            known = max(number for number in self._states if number < step)
            self._states[step] = toys.after(step - known, self._states[known])
        return self._states[step]

    def forget_before(self, step: int) -> None:
        """Frees what is not needed any more."""
        for number in [number for number in self._states if 0 < number < step]:
            del self._states[number]


def newest(root: Path, right: Trajectory) -> int:
    """The step of the newest complete checkpoint, 0 where there is none; it loads, and is what it should be."""
    path = latest(root)
    if path is None:
        return 0
    step = int(path.name.removeprefix("step-"))
    loaded = load_state(path, right.start, IDENTITY, roles=toys.ROLES)
    difference = tree.first_difference(right.at(step), loaded)
    assert difference is None, f"{path} is not the state after step {step}: {difference}"
    return step


def save(root: Path, step: int, right: Trajectory, keep: int) -> None:
    with Writer(root, IDENTITY, roles=toys.ROLES, keep=keep) as writer:
        writer.save(step, right.at(step))


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.glob(".*")]


# ------------------------------------------------------------------------------------------------- cuts


@attrs.frozen(kw_only=True)
class Cuts:
    """What was cut, and what was found afterwards: how often the old state, and how often the new one."""

    operations: Counter[str]
    before: int
    after: int


def cuts(home: Path, width: int, keep: int, fault: Fault, every: int = 1) -> Cuts:
    """Saves a third state over and over, each time with another operation as the last, or the one that fails.

    Args:
        home: an empty folder.
        width: of the toy state, about 26 bytes each.
        keep: how many states stay.
        fault: what happens at the operation.
        every: only every so many operations, the first one included.
    """
    right = Trajectory(width)
    template = home / "template"
    for step in (1, 2):
        save(template, step, right, keep)
    counted = FaultyDisk()
    with counted.installed():
        save(_copy(template, home / "counted"), 3, right, keep)
    seen = []
    for at in range(0, len(counted.done), every):
        root = _copy(template, home / "cut")
        _cut_save(root, right, keep, FaultyDisk(at, fault))
        seen.append(newest(root, right))
        assert seen[-1] in (2, 3), f"after a cut at operation {at} the newest state is {seen[-1]}"
        save(root, 4, right, keep)
        assert newest(root, right) == 4 and not leftovers(root), f"after a cut at operation {at}: {leftovers(root)}"
    return Cuts(operations=Counter(counted.done[::every]), before=seen.count(2), after=seen.count(3))


def _copy(template: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(template, target))


def _cut_save(root: Path, right: Trajectory, keep: int, disk: FaultyDisk) -> None:
    if disk.fault == "kill":
        child = os.fork()
        if not child:
            with disk.installed():
                save(root, 3, right, keep)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the process went on behind its own end"
        return
    try:
        with disk.installed():
            save(root, 3, right, keep)
    except Stopped:
        assert disk.fault == "stop"
    except CheckpointError as error:
        assert isinstance(disk.fault, OSError) and "\n" not in str(error)
        assert str(root) in str(error) and os.strerror(disk.fault.errno or 0) in str(error), str(error)
    assert disk.failed


def main_cuts() -> int:
    total = 0
    for keep in (1, 2):
        for fault in ("stop", "kill", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
            with tempfile.TemporaryDirectory() as home:
                found = cuts(Path(home), 100_000, keep, fault)
            number = sum(found.operations.values())
            total += number
            shown = ", ".join(f"{name} {count}" for name, count in sorted(found.operations.items()))
            print(f"keep {keep}, {fault!r}: {number} cuts ({shown}): {found.before} old, {found.after} new", flush=True)
    print(f"{total} cuts, 0 lost")
    return 0


# ------------------------------------------------------------------------------------------------- kills


@attrs.frozen(kw_only=True)
class Kill:
    """A process that was killed.

    Attributes:
        number: from 1.
        begun: the step that it went on from.
        whole: the last step that it knew to be saved.
        found: the step of the newest complete state afterwards.
        unfinished: whether a write was left unfinished.
    """

    number: int
    begun: int
    whole: int
    found: int
    unfinished: bool

    def __str__(self) -> str:
        left = ", a write unfinished" if self.unfinished else ""
        return f"{self.number:3}  began at {self.begun}, knew {self.whole} to be whole, left {self.found}{left}"


def kills(root: Path, count: int, seed: int, width: int = 100_000) -> Iterator[Kill]:
    """Starts and kills `count` processes one after the other, each of which continues in `root`.

    Raises:
        AssertionError: something was lost, or a process began anew though there was something to go on from.
    """
    draw = random.Random(seed)
    right = Trajectory(width)
    before = 0
    for number in range(1, count + 1):
        told, child = _trained(root, right)
        begun = int(_line(told).removeprefix("begun "))
        assert begun == before, f"the process began at step {begun}, but step {before} had been saved"
        _wait(root, draw)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        known = [int(line.removeprefix("whole ")) for line in _rest(told)]
        whole = known[-1] if known else begun
        unfinished = bool(leftovers(root))
        found = newest(root, right)
        assert found >= max(before, whole), f"step {max(before, whole)} had been saved, and {found} is left"
        right.forget_before(found)
        before = found
        yield Kill(number=number, begun=begun, whole=whole, found=found, unfinished=unfinished)


def _trained(root: Path, right: Trajectory) -> tuple[int, int]:
    """A process that trains and saves after every step, and what it tells about that."""
    told, tell = os.pipe()
    child = os.fork()
    if child:
        os.close(tell)
        return told, child
    path = latest(root)
    state = right.start if path is None else load_state(path, right.start, IDENTITY, roles=toys.ROLES)
    os.write(tell, b"begun %d\n" % state.cursor.total)
    with Writer(root, IDENTITY, roles=toys.ROLES, keep=2) as writer:
        while True:
            state, _ = toys.step(state, toys.batch(state))
            writer.save(state.cursor.total, state)
            if state.cursor.total > 1:  # the save before this one has been waited for
                os.write(tell, b"whole %d\n" % (state.cursor.total - 1))


def _line(told: int) -> str:
    text = b""
    while not text.endswith(b"\n"):
        text += os.read(told, 1)
    return text.decode().strip()


def _rest(told: int) -> list[str]:
    text = b""
    while piece := os.read(told, 1 << 16):
        text += piece
    os.close(told)
    return text.decode().split("\n")[:-1]


def _wait(root: Path, draw: random.Random) -> None:
    """Some time; of every four, once until a write is on its way, and some time longer."""
    time.sleep(draw.random() ** 2)
    if draw.randrange(4) == 0:
        until = time.monotonic() + 5
        while not leftovers(root) and time.monotonic() < until:
            pass
        time.sleep(draw.random() * 0.01)


def main_kills(count: int, seed: int) -> int:
    with tempfile.TemporaryDirectory() as home:
        unfinished = 0
        for kill in kills(Path(home) / "states", count, seed):
            print(kill, flush=True)
            unfinished += kill.unfinished
    print(
        f"{count} kills, {unfinished} of them in the middle of a write; {kill.found} steps saved; 0 lost, 0 begun anew"
    )
    return 0


# ------------------------------------------------------------------------------------------------- a full disk


@attrs.frozen(kw_only=True)
class Full:
    """How a run on a full disk ended.

    Attributes:
        how: what made the disk full.
        sentence: the only line that it printed as an error.
        kept: the checkpoint that was left.
    """

    how: str
    sentence: str
    kept: str


LONG = tiny.changes({"phases.sft.steps": 12, "phases.grpo.steps": 12, "checkpoint.keep": 1})


def full(home: Path, *, mount: bool = True) -> Full:
    """Runs into a full disk, looks at what is left, makes room, and goes on; the end must be that of a run with room.

    Args:
        home: an empty folder.
        mount: on a small tmpfs; where this process may not mount one, and without it, a running process is given
            a limit on the length of its files, which the kernel enforces with another reason ("File too large").
    """
    spec = str(tiny.write_spec(home))
    assert tiny.in_process([spec, "--out", str(home / "whole"), *LONG]).code == 0
    files = [path.stat().st_size for path in tiny.last_checkpoint(home / "whole").iterdir()]
    place = home / "small"
    place.mkdir()
    words = [spec, "--out", str(place / "out"), *LONG]
    room = sum(files) * 3 // 2
    with _small_disk(place, room, mount) as grow:
        done = tiny.in_process(words) if grow else _limited(words, place / "out", max(files) // 2)
        assert done.code == 2, done.out + done.err
        (sentence,) = done.err.splitlines()
        kept = tiny.last_checkpoint(place / "out")
        assert not state_problems(kept), state_problems(kept)
        if grow is not None:
            grow()
        again = tiny.in_process([*words, "--resume"])
        assert again.code == 0 and "continuing after step" in again.out, again.out + again.err
        difference = tiny.difference(home / "whole", place / "out")
        assert difference is None, f"the continued run differs in {difference}"
    how = f"a tmpfs of {room} bytes" if grow else f"files of at most {max(files) // 2} bytes"
    return Full(how=f"{how} for checkpoints of {sum(files)}", sentence=sentence, kept=kept.name)


@contextmanager
def _small_disk(place: Path, size: int, mount: bool) -> Iterator[Callable[[], None] | None]:
    """Mounts a small file system; gives what makes it larger, or None where it cannot be mounted."""

    def run(*words: str) -> bool:
        return subprocess.run(words, capture_output=True).returncode == 0

    if not mount or not run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)):
        yield None
        return
    try:
        yield lambda: assert_done(run("mount", "-o", "remount,size=64m", str(place)))
    finally:
        assert_done(run("umount", str(place)))


def assert_done(done: bool) -> None:
    assert done


def _limited(words: list[str], out: Path, longest: int) -> tiny.Done:
    """The command in a process of its own, with a limit on the length of its files once it has saved a checkpoint."""
    with tiny.popen(words, out.parent) as process:
        while process.poll() is None and not list((out / "checkpoints").glob("step-*")):
            time.sleep(0.001)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (longest, resource.RLIM_INFINITY))
        out, err = process.communicate(timeout=300)
    return tiny.Done(process.returncode, out, err)


def main_full() -> int:
    for mount in (True, False):
        with tempfile.TemporaryDirectory() as home:
            found = full(Path(home), mount=mount)
        print(
            f"{found.how}\n  {found.sentence}\n  {found.kept} was left whole, and the run continued bit for bit",
            flush=True,
        )
    return 0


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    what, *rest = words or [""]
    if what == "cuts":
        return main_cuts()
    if what == "kills":
        return main_kills(count=int(rest[0]) if rest else 200, seed=int(rest[1]) if len(rest) > 1 else 0)
    if what == "full":
        return main_full()
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
