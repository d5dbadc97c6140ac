"""Thousands of damaged and hostile checkpoints, each loaded or refused.

    python tests/faults/fuzz_checkpoints.py [N=10000] [SEED=0] [FIRST=0]

Headers, indexes and folders of single and sharded checkpoints are mutated at random. No case may crash, hang for five
seconds, open a file outside the folder, or give a tensor that is not in the files. Prints what became of them and the
memory that it took; exit 1 when a case is wrong. `N SEED CASE` with N = 1 repeats one case.
"""

from __future__ import annotations

import argparse
import collections
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from faults.checkpoint_folders import Folder, whole, write  # noqa: E402
from faults.checkpoint_judge import judged  # noqa: E402
from faults.checkpoint_mutations import mutate  # noqa: E402

SECONDS = 5.0
MOST_MEMORY = 200_000_000


def main(count: int, seed: int, first: int) -> int:
    """Runs the cases `first` to `first + count` and returns the exit code."""
    signal.signal(signal.SIGALRM, _too_long)
    for shards in (1, 3):
        assert _run(whole(shards)) == "accepted"
    _reset_peak()
    before, began = _memory("VmRSS"), time.perf_counter()
    outcomes: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    wrong = 0
    for case in range(first, first + count):
        chance = random.Random(f"{seed} {case}")
        folder, done = mutate(chance, whole(chance.choice((1, 3))))
        kinds.update(part.split(":")[0] for part in done.split("; ") if ": " in part)
        try:
            outcomes[_run(folder)] += 1
        except BaseException:  # whatever it is, it is what was searched for
            wrong += 1
            print(f"case {case} is wrong ({done}):\n{traceback.format_exc(limit=-6)}", flush=True)
    grown = _memory("VmHWM") - before
    print(f"{count} cases of seed {seed} in {time.perf_counter() - began:.0f} s: {dict(outcomes)}, {wrong} wrong")
    print(f"mutations: {dict(kinds)}")
    print(
        f"memory: {before / 1e6:.0f} MB before, at most {grown / 1e6:.0f} MB more (allowed are {MOST_MEMORY / 1e6:.0f})"
    )
    return int(wrong > 0 or grown > MOST_MEMORY)


def _run(folder: Folder) -> str:
    with tempfile.TemporaryDirectory() as root:
        path = write(Path(root), folder)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            return judged(path)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"not done within {SECONDS} seconds")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _memory(field: str) -> int:
    """A line of the process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=10_000)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument(
        "first", nargs="?", type=int, default=0, help="the first case; a case has one or several mutations"
    )
    options = parser.parse_args()
    sys.exit(main(options.count, options.seed, options.first))
