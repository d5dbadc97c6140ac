"""The commands of the tools: their exit codes, and what each prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from areno_fn.ckpt.tools import diff_text, inspect
from areno_fn.ckpt.tools.convert import bytes_of, convert
from areno_fn.ckpt.tools.diff import difference
from areno_fn.ckpt.tools.pieces import Progress
from areno_fn.ckpt.tools.source import open_source
from areno_fn.ckpt.tools.text import many
from areno_fn.ckpt.tools.verify import good, hashes, not_finite, problems
from areno_fn.contracts.errors import CheckpointError


def diff(options: argparse.Namespace) -> int:
    """Prints in what two checkpoints differ; 0 when they are equal, else 1."""
    if options.top < 0:
        raise CheckpointError(f"--top must be at least 0, received {options.top}")
    device = _device(options.device)
    a, b = open_source(options.a), open_source(options.b)
    found = difference(a, b, options.pattern, device, _progress())
    _print([diff_text.title("A", a), diff_text.title("B", b), *diff_text.lines(found, options.top)])
    return 0 if found.same else 1


def show(options: argparse.Namespace) -> int:
    """Prints what a checkpoint is."""
    listed = options.pattern if options.tensors or options.pattern else None
    found = inspect.described(open_source(options.dir), listed)
    _print([json.dumps(found, indent=2)] if options.json else inspect.lines(found))
    return 0


def verify(options: argparse.Namespace) -> int:
    """Prints everything that is wrong with a checkpoint; 0 when nothing is, else 1."""
    found = problems(options.dir)
    if options.hash:
        _print(f"{digest}  {name}" for digest, name in hashes(Path(options.dir)))
    if options.values and not found:
        found = not_finite(open_source(options.dir), _progress())
    if found:
        _print([*(f"problem: {line}" for line in found), f"{options.dir}: {many(len(found), 'problem')}."])
        return 1
    values = ", every number finite" if options.values else ""
    _print([f"OK {options.dir}: {good(open_source(options.dir))}{values}."])
    return 0


def write(options: argparse.Namespace) -> int:
    """Writes a folder anew."""
    size = bytes_of(options.shard_size)
    if len(options.merge) > 1:
        raise CheckpointError(f"--merge takes one adapter, received {', '.join(options.merge)}; merge them one by one")
    adapter = next(iter(options.merge), None)
    out = convert(options.source, options.out, dtype=options.dtype, shard_bytes=size, adapter=adapter)
    written = open_source(out)
    merged = "" if adapter is None else f", with {adapter} merged in"
    _print([f"{out}: {good(written)}{merged}."])
    return 0


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise CheckpointError(f"--device {text} is no device; write cpu or cuda, cuda:1 and so on") from None
    if device.type not in ("cpu", "cuda"):
        raise CheckpointError(f"--device {text} cannot compute in float64 here; write cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CheckpointError(f"--device {text}: there are {torch.cuda.device_count()} CUDA devices")
    return device


def _progress() -> Progress | None:
    """Shows how far it is, to a person who waits."""
    if not sys.stderr.isatty():
        return None
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // total
        if percent != shown:
            shown = percent
            sys.stderr.write("\r\x1b[K" if done == total else f"\r{percent} %")
            sys.stderr.flush()

    return show


def _print(lines: Iterable[str]) -> None:
    """Names come from files, so what a terminal would obey is shown instead of sent."""
    for line in lines:
        parts = line.splitlines() or [""]
        for part in parts:
            sys.stdout.write("".join(c if c.isprintable() else ascii(c)[1:-1] for c in part) + "\n")
