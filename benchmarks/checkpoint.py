"""Reading and writing a checkpoint of 1.2 GB, against the safetensors library and the disk, as ratios of one run.

    python -m benchmarks.checkpoint [--folder DIR] [--repeats 7] [--threads N] [--piece MB] [--device cpu | cuda]

Cases are interleaved, in an order that changes with every repeat; printed are medians, the fastest and the slowest,
and ratios of medians and of the fastest, above 1 where this library is faster. "cold" means that the file was taken
out of the system's cache before. All leaves are in memory at the end of every load, and all give the same fused leaves;
those of the library that are not joined are views of the mapped file, "owned" means that they are copied as well, so
that they do not change with the file, as ours never do. On the CPU every load has a process of its own, because a
second load would find the memory of the first. Writes are given with and without waiting for the disk; this library
always waits, so for the figure without that is switched off. On CUDA the cold load is to be compared with the rate at
which the file can be read at all.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from areno_fn.ckpt import disk, hf, outbound, ring, stream
from areno_fn.ckpt.load import default_threads
from benchmarks import checkpoint_cases as cases
from benchmarks import needs

Case = tuple[Callable[[], object], Callable[[], float | None]]
"""What is done before, and what is measured; it may say itself how many seconds it took."""


def main() -> None:
    """Makes the checkpoint, measures, prints."""
    options = _options()
    ring.PIECE = stream.PIECE = outbound.PIECE = options.piece << 20
    if options.alone:
        print(_alone(options))
        return
    root = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder))
    try:
        path = cases.make(root / "model") / cases.FILE
        name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        how = f"{options.threads} threads, pieces of {options.piece} MB, {options.repeats} repeats"
        print(f"{path.stat().st_size / 1e9:.2f} GB, {name}, torch {torch.__version__}, {how}, {root}")
        for state in ("warm", "cold"):
            _report(state, path.stat().st_size, _timed(_reading(path, state, options), options.repeats))
        _measure_writing(path, options)
    finally:
        shutil.rmtree(root)


def _before(path: Path, state: str) -> Callable[[], object]:
    return cases.read_raw(path, 1, pinned=False) if state == "warm" else lambda: cases.drop(path)


def _reading(path: Path, state: str, options: argparse.Namespace) -> dict[str, Case]:
    loads: dict[str, Case] = {}
    for name in cases.LOADS if options.device == "cpu" else list(cases.LOADS)[:2]:
        if options.device == "cpu":
            loads[f"load, {name}"] = (lambda: None, _child(path, name, state, options))
        else:
            loads[f"load, {name}"] = (_before(path, state), cases.LOADS[name](path, options.device, options.threads))
    for threads in sorted({1, 2, options.threads}):
        read = cases.read_raw(path, threads, options.device == "cuda")
        loads[f"read, {threads} threads"] = (_before(path, state), read)
    return loads


def _child(path: Path, name: str, state: str, options: argparse.Namespace) -> Callable[[], float]:
    """A load on the CPU in a process of its own, as in a program that loads once: no memory is there to be used again."""
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--alone", name, "--state", state, "--folder", str(path)]
    command += ["--threads", str(options.threads), "--piece", str(options.piece)]
    return lambda: float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _alone(options: argparse.Namespace) -> float:
    case = cases.LOADS[options.alone](options.folder, "cpu", options.threads)
    _before(options.folder, options.state)()
    start = time.perf_counter()
    case()
    return time.perf_counter() - start


def _measure_writing(path: Path, options: argparse.Namespace) -> None:
    iso, folder, size = cases.layout(), hf.open_folder(path.parent), path.stat().st_size
    leaves = hf.load(folder, iso, device=options.device)
    out = path.parents[1] / "out"
    real = disk.sync, disk.begin_flush
    for synced, told in ((False, "written"), (True, "on the disk")):
        disk.sync, disk.begin_flush = real if synced else (lambda descriptor: None, lambda *stretch: None)
        saves: dict[str, Case] = {
            "save, ours": (lambda: _clean(out), cases.save_ours(out, leaves, iso, folder)),
            "save, library": (lambda: _clean(out), cases.save_library(out, leaves, iso, synced)),
            "write": (lambda: _clean(out), cases.write_raw(out.with_suffix(".raw"), size, synced)),
        }
        if options.device == "cuda" and synced:
            saves["device to pinned host"] = (lambda: None, cases.to_host(leaves))
        _report(told, size, _timed(saves, options.repeats))
    disk.sync, disk.begin_flush = real


def _clean(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    (out.parent / "out.raw").unlink(missing_ok=True)
    cases.sync(out.parent / "model" / cases.FILE)


def _timed(measured: dict[str, Case], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in measured}
    order = list(measured)
    for repeat in range(repeats + 1):
        random.Random(repeat).shuffle(order)
        for name in order:
            before, case = measured[name]
            before()
            start = time.perf_counter()
            taken = case()
            if repeat:  # the first round only warms up
                times[name].append(time.perf_counter() - start if taken is None else taken)
    return times


def _report(told: str, size: int, times: dict[str, list[float]]) -> None:
    ours = next(times[name] for name in times if name.endswith("ours"))
    print(f"{told}:")
    for name, taken in times.items():
        middle, fastest, slowest = statistics.median(taken), min(taken), max(taken)
        ratio = (
            f"ours is {middle / statistics.median(ours):.2f} times as fast ({fastest / min(ours):.2f} by the fastest)"
        )
        print(
            f"  {name:<24} {middle:7.3f} s [{fastest:.3f} .. {slowest:.3f}] {size / middle / 1e9:6.2f} GB/s"
            f"{'' if taken is ours else '  ' + ratio}",
            flush=True,
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoint is made and removed; a temporary folder otherwise"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, help="that read at a time; what loading chooses when not given")
    parser.add_argument("--piece", type=int, default=ring.PIECE >> 20, help="MB that a thread reads at once")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--alone", choices=tuple(cases.LOADS), help=argparse.SUPPRESS)
    parser.add_argument("--state", choices=("warm", "cold"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.alone:
        needs.folder(options.folder, "--folder")
    options.threads = options.threads or default_threads(torch.device(options.device))
    return options


if __name__ == "__main__":
    needs.run(main)
