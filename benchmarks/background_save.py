"""How long a checkpoint holds up training, against the copy from the device alone, and whether training goes on beside it.

    python -m benchmarks.background_save [--folder DIR] [--gigabytes 8] [--repeats 5]

"blocked" is what `Writer.save` takes; "copy" moves as many bytes from the device to page-locked memory, tensor by
tensor, and nothing else. Memory is reserved as a run reserves it, while the first steps are made; the first save is
given apart all the same. A step is a chain of matrix products; steps are timed alone and while a checkpoint is being
written. Without a GPU everything is on the CPU, where copy and steps share the processor.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from areno_fn.ckpt.background import Writer
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.key import Key
from areno_fn.contracts.state import Counters, Cursor, TrainState
from benchmarks import needs

IDENTITY = RunIdentity(family="", model="", phases="", data="", parameters="", optimizers="", seed=0)
PIECES = 64


def main() -> None:
    """Makes a state, measures, prints."""
    parser = argparse.ArgumentParser(description="How long a checkpoint holds up training.")
    parser.add_argument("--folder", help="where checkpoints go; a temporary folder in it is used and removed")
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    needs.folder(options.folder, "--folder")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state = _state(options.gigabytes, device)
    tensors = list(state.params["actor"].values())
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    copy = statistics.median(_copies(tensors, options.repeats))
    alone = statistics.median(_timed(lambda: _step(device)) for _ in range(20))
    root = Path(tempfile.mkdtemp(prefix="background-", dir=options.folder))
    try:
        blocked, whole, beside = _saves(root, state, device, options.repeats)
    finally:
        shutil.rmtree(root)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    later = statistics.median(blocked[1:])
    print(f"{size / 1e9:.2f} GB, {name}, torch {torch.__version__}, {options.repeats} repeats")
    print(f"copy alone          {copy:8.3f} s  {size / copy / 1e9:7.2f} GB/s")
    print(f"blocked, first save {blocked[0]:8.3f} s")
    print(
        f"blocked, later      {later:8.3f} s  {size / later / 1e9:7.2f} GB/s   {copy / later:5.2f} of the copy's rate"
    )
    print(f"until whole         {statistics.median(whole):8.3f} s  {size / statistics.median(whole) / 1e9:7.2f} GB/s")
    print(f"a step alone        {alone * 1e3:8.3f} ms")
    print(
        f"a step beside it    {statistics.median(beside) * 1e3:8.3f} ms  {alone / statistics.median(beside):5.2f} of the speed"
    )


def _state(gigabytes: float, device: torch.device) -> TrainState:
    length = int(gigabytes * 1e9 / 4 / PIECES)
    actor = {f"w{number}": torch.full((length,), float(number), device=device) for number in range(PIECES)}
    return TrainState(
        params={"actor": actor}, optim={}, snapshots={}, counters=Counters(), key=Key.of(0), cursor=Cursor()
    )


def _copies(tensors: list[torch.Tensor], repeats: int) -> list[float]:
    pinned = tensors[0].is_cuda
    out = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for tensor in tensors]

    def copy() -> None:
        for place, tensor in zip(out, tensors, strict=True):
            place.copy_(tensor, non_blocking=True)

    copy()
    return [_timed(copy) for _ in range(repeats)]


def _saves(
    root: Path, state: TrainState, device: torch.device, repeats: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds that each save blocked, until it was whole, and of the steps made meanwhile."""
    blocked, whole, beside = [], [], []
    with Writer(root, IDENTITY, keep=1) as writer:
        writer.reserve(state)
        for _ in range(200):  # what a run does before its first checkpoint
            _timed(lambda: _step(device))
        for number in range(repeats + 1):
            begun = time.perf_counter()
            writer.save(number, state)
            blocked.append(time.perf_counter() - begun)
            beside += [_timed(lambda: _step(device)) for _ in range(20)]
            writer.wait()
            whole.append(time.perf_counter() - begun)
    return blocked, whole, beside


def _step(device: torch.device) -> None:
    size = 8192 if device.type == "cuda" else 512
    value = torch.ones(size, size, device=device, dtype=torch.bfloat16)
    for _ in range(8):
        value = (value @ value).clamp(0, 1)


def _timed(function: Callable[[], None]) -> float:
    _settle()
    begun = time.perf_counter()
    function()
    _settle()
    return time.perf_counter() - begun


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    needs.run(main)
