"""What averages, snapshots on the host and merged weights cost.

    python -m benchmarks.variants [--shape qwen3-0.6b | tiny] [--rank 16] [--repeats 5]

Parameters are in bf16 on a GPU, in float32 on a CPU. The best of some repetitions is printed: one update of the average, the two
directions of a move (the first one, which also takes page-locked memory, apart), the merge of adapters on every linear map of
the layers, and decoding with adapters and with weights that they are merged into.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import areno_fn as af
from areno_fn.engine.derived import Derived
from areno_fn.models import adapters
from benchmarks import needs
from benchmarks.adapters import _decoding, _model
from benchmarks.train_step import SHAPES


def main() -> None:
    """Measures everything and prints one line each."""
    options = _options()
    needs.room(options.shape, "--shape")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    _, params, own, sites = _model(options, device, dtype)
    size = sum(leaf.numel() * leaf.itemsize for leaf in af.tree.leaves(params))
    print(f"{name}, torch {torch.__version__}, {options.shape}, {dtype}, {size / 1e9:.2f} GB of parameters")
    _average(params, device, options)
    _moves(params, size, device, options)
    _merge(params, own, sites, device, options)
    with_adapters, merged = (_decoding(options, device, dtype, apart) for apart in (True, False))
    print(f"decoding               {with_adapters:8.0f} tokens/s with adapters, {merged:.0f} merged")


def _average(params: Any, device: torch.device, options: argparse.Namespace) -> None:
    average = af.ema_begin(params)
    seconds = _best(lambda: af.ema_update(average, params, 0.999), device, options)
    print(f"update of the average  {seconds * 1e3:8.1f} ms")


def _moves(params: Any, size: int, device: torch.device, options: argparse.Namespace) -> None:
    first = _seconds(lambda: af.offload(params), device)
    away = af.offload(params)
    out, back = (_best(move, device, options) for move in (lambda: af.offload(params), lambda: af.onload(away, device)))
    for label, seconds in (("offload, first", first), ("offload", out), ("onload", back)):
        print(f"{label:22s} {size / seconds / 1e9:8.2f} GB/s, {seconds * 1e3:.1f} ms")


def _merge(params: Any, own: Any, sites: Any, device: torch.device, options: argparse.Namespace) -> None:
    made = Derived(lambda source: adapters.merge(adapters.adapt(source["base"], source["actor"], sites)))

    def merge() -> None:
        made.clear()
        made.of({"base": params, "actor": own})

    print(f"merge                  {_best(merge, device, options) * 1e3:8.1f} ms")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def _best(call: Callable[[], Any], device: torch.device, options: argparse.Namespace) -> float:
    return min(_seconds(call, device) for _ in range(options.repeats))


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    needs.run(main)
