"""Kills a run with SIGKILL at random moments, continues it each time, and compares with a run that was left alone.

    python tests/e2e/kill.py [COUNT] [SEED]

Every moment is printed: when it was, what was on the disk, and whether the continued run ended with the same bits.
Of every four moments one lies in the middle of writing a checkpoint, and one is followed by a second kill.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from e2e import tiny

STEPS = 12
OUT = "out"
WORDS = ["tiny.toml", *tiny.changes({"phases.sft.steps": STEPS, "phases.grpo.steps": STEPS})]


@attrs.frozen(kw_only=True)
class Moment:
    """A kill and what came of it.

    Attributes:
        number: from 1.
        kills: for each kill when it was and what was on the disk.
        difference: in what the continued run differs from the one that was left alone; None: in nothing.
    """

    number: int
    kills: tuple[str, ...]
    difference: str | None

    def __str__(self) -> str:
        verdict = "equal bit for bit" if self.difference is None else f"DIFFERENT: {self.difference}"
        return f"{self.number:3}  {'; again '.join(self.kills)}  ->  {verdict}"


def moments(home: Path, count: int, seed: int = 0) -> Iterator[Moment]:
    """Kills `count` runs, each in a folder of its own inside `home`."""
    draw = random.Random(seed)
    whole = home / "whole"
    length = _left_alone(whole)
    for number in range(1, count + 1):
        folder = home / f"killed-{number}"
        tiny.write_spec(folder)
        kills = [_kill(folder, draw.randint(1, length), draw.random(), in_write=number % 4 == 2)]
        if number % 4 == 0:
            left = max(1, length - logged(folder))
            kills.append(_kill(folder, draw.randint(1, left), draw.random(), "--resume", in_write=False))
        done = tiny.in_subprocess([*WORDS, "--resume"], folder)
        difference = tiny.difference(whole / OUT, folder / OUT) if done.code == 0 else f"exit {done.code}: {done.err}"
        yield Moment(number=number, kills=tuple(kills), difference=difference)


def _left_alone(folder: Path) -> int:
    """Runs to the end; returns the number of lines logged."""
    tiny.write_spec(folder)
    done = tiny.in_subprocess(WORDS, folder)
    assert done.code == 0, done.out + done.err
    return logged(folder)


def _kill(folder: Path, lines: int, part: float, *flags: str, in_write: bool) -> str:
    """Kills a run once it has logged so many more lines, and a random part of a step or an unfinished write later."""
    process = tiny.popen([*WORDS, *flags], folder)
    begun = wait_for(process, lambda: _began(folder, process))
    before = logged(folder)
    first = wait_for(process, lambda: logged(folder) >= before + lines)
    pace = (first - begun) / lines
    wait_for(process, lambda: time.monotonic() - first >= part * pace)
    if in_write:
        wait_for(process, lambda: bool(_unfinished(folder)), pause=0.0)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    how = "killed" if process.returncode == -signal.SIGKILL else "ended by itself"
    return f"{how} {time.monotonic() - begun:5.2f} s after its start, {_shown(folder)}"


def _began(folder: Path, process: subprocess.Popen[str]) -> bool:
    """Whether the process has opened its log: a continued run has cut it to the length that counts by then."""
    path = folder / OUT / "metrics.jsonl"
    descriptors = Path(f"/proc/{process.pid}/fd")
    with contextlib.suppress(OSError):
        return any(entry.resolve() == path.resolve() for entry in descriptors.iterdir())
    return False


def wait_for(process: subprocess.Popen[str], happened: Callable[[], bool], pause: float = 0.002) -> float:
    """Waits for something, or for the end of the process; returns the time."""
    while process.poll() is None and not happened():
        time.sleep(pause)
    return time.monotonic()


def logged(folder: Path) -> int:
    path = folder / OUT / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _unfinished(folder: Path) -> list[str]:
    """What stands beside its final name, or half removed."""
    return [path.name for place in (".", "checkpoints") for path in (folder / OUT / place).glob(".*.writing-*")]


def _shown(folder: Path) -> str:
    whole = sorted(path.name for path in (folder / OUT / "checkpoints").glob("step-*"))
    writing = "a write unfinished, " if _unfinished(folder) else ""
    return f"{logged(folder)} lines logged, {writing}checkpoints: {', '.join(name[-2:] for name in whole) or 'none'}"


def main(count: int, seed: int) -> int:
    different = 0
    with tempfile.TemporaryDirectory() as home:
        for moment in moments(Path(home), count, seed):
            print(moment, flush=True)
            different += moment.difference is not None
    print(f"{count} moments, {count - different} equal bit for bit, {different} different")
    return 1 if different else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=20, help="moments; each takes some 10 seconds")
    parser.add_argument("seed", nargs="?", type=int, default=0)
    options = parser.parse_args()
    sys.exit(main(options.count, options.seed))
