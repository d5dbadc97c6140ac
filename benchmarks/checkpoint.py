"""Reading and writing a checkpoint of 1.2 GB, against the safetensors library and the disk, as ratios of one run.

    python benchmarks/checkpoint.py [--folder DIR] [--repeats 7] [--threads 4] [--piece MB] [--device cpu | cuda]

Cases are interleaved, in an order that changes with every repeat; printed are medians, the fastest and the slowest,
and ratios of medians and of the fastest, above 1 where this library is faster. "cold" means that the file was taken
out of the system's cache before. All leaves are in memory at the end of every load, and both sides give the same fused
leaves. Writes are given with and without waiting for the disk; this library always waits, so for the
figure without that is switched off. On CUDA the cold load is compared with the rate at which the file can be read at all.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import checkpoint_cases as cases
import torch

from areno_fn.ckpt import disk, hf, outbound, ring, stream

Case = tuple[Callable[[], None], Callable[[], None]]
"""What is done before, and what is measured."""


def main() -> None:
    """Makes the checkpoint, measures, prints."""
    options = _options()
    ring.PIECE = stream.PIECE = outbound.PIECE = options.piece << 20
    root = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder))
    try:
        _measure(root, options)
    finally:
        shutil.rmtree(root)


def _measure(root: Path, options: argparse.Namespace) -> None:
    iso, path = cases.layout(), cases.make(root / "model") / "model.safetensors"
    folder = hf.open_folder(path.parent)
    size = path.stat().st_size
    device, threads = options.device, options.threads
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads of torch"
    how = f"{threads} threads, pieces of {options.piece} MB, {options.repeats} repeats"
    print(f"{size / 1e9:.2f} GB, {name}, torch {torch.__version__}, {how}, {root}")

    warm = cases.read_raw(path, 1, pinned=False)
    cold = lambda: cases.drop(path)  # noqa: E731
    loads = {
        "load, ours": cases.load_ours(folder, iso, device, threads),
        "load, library": cases.load_library(path, iso, device),
    }
    if device == "cpu":
        loads["load, library, owned"] = cases.load_library_owned(path, iso)
    reads = {f"read, {n} threads": cases.read_raw(path, n, device == "cuda") for n in sorted({1, 2, threads})}
    _report("warm", size, _timed({name: (warm, case) for name, case in (loads | reads).items()}, options.repeats))
    _report("cold", size, _timed({name: (cold, case) for name, case in (loads | reads).items()}, options.repeats))

    leaves = hf.load(folder, iso, device=device)
    out = root / "out"
    real = disk.sync, disk.begin_flush
    for synced, told in ((False, "written"), (True, "on the disk")):
        disk.sync, disk.begin_flush = real if synced else (lambda descriptor: None, lambda *stretch: None)
        saves: dict[str, Case] = {
            "save, ours": (lambda: _clean(out), cases.save_ours(out, leaves, iso, folder)),
            "save, library": (lambda: _clean(out), cases.save_library(out, leaves, iso, synced)),
            "write": (lambda: _clean(out), cases.write_raw(root / "out.raw", size, synced)),
        }
        if device == "cuda" and synced:
            saves["device to pinned host"] = (lambda: None, cases.to_host(leaves))
        _report(told, size, _timed(saves, options.repeats))
    disk.sync, disk.begin_flush = real


def _clean(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    (out.parent / "out.raw").unlink(missing_ok=True)
    cases.sync(out.parent / "model" / "model.safetensors")


def _timed(measured: dict[str, Case], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in measured}
    order = list(measured)
    for repeat in range(repeats + 1):
        random.Random(repeat).shuffle(order)
        for name in order:
            before, case = measured[name]
            before()
            start = time.perf_counter()
            case()
            if repeat:  # the first round only warms up
                times[name].append(time.perf_counter() - start)
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
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--piece", type=int, default=ring.PIECE >> 20, help="MB that a thread reads at once")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
