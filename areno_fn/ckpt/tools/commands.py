"""The command line of the tools: arguments, exit codes, and what each command prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
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

_WHAT = (
    "A checkpoint is a Hugging Face folder (one file, or shards and an index), a folder of resumable state (step-...), "
    "a PEFT adapter, or one .safetensors file."
)


def command(arguments: Sequence[str]) -> int:
    """Runs one subcommand and returns its exit code."""
    options, strange = _parser().parse_known_args(list(arguments))
    if strange:  # argparse itself would show how the command above is used
        options.parser.error(f"unrecognized arguments: {' '.join(strange)}")
    code: int = options.run(options)
    return code


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m areno_fn.ckpt", description="Compare, inspect, verify and convert checkpoints.", epilog=_WHAT
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    words = "say in what two checkpoints differ; exit code 0: in nothing, 1: in something, 2: one cannot be read"
    one = commands.add_parser(
        "diff", help=words, description=_sentence(words), epilog=f"{diff_text.DEFINITION}. {_WHAT}"
    )
    one.set_defaults(run=diff, parser=one)
    one.add_argument("a", metavar="A")
    one.add_argument("b", metavar="B")
    _add_pattern(one, "compare only tensors whose names match")
    one.add_argument("--top", type=int, default=20, metavar="K", help="lines of each list (default 20; 0 shows all)")
    one.add_argument("--device", default="cpu", metavar="D", help="where numbers are compared (default cpu)")

    words = "say what a checkpoint is, from its headers alone"
    one = commands.add_parser("inspect", help=words, description=_sentence(words), epilog=_WHAT)
    one.set_defaults(run=show, parser=one)
    one.add_argument("dir", metavar="DIR")
    one.add_argument("--tensors", action="store_true", help="list the tensors")
    _add_pattern(one, "list only tensors whose names match")
    one.add_argument("--json", action="store_true", help="print an object instead of text")

    words = (
        "check everything that can be checked without a run; exit code 0: whole, 1: problems, 2: it is no checkpoint"
    )
    one = commands.add_parser("verify", help=words, description=_sentence(words), epilog=_WHAT)
    one.set_defaults(run=verify, parser=one)
    one.add_argument("dir", metavar="DIR")
    one.add_argument("--hash", action="store_true", help="print the SHA-256 of every file, as sha256sum does")
    one.add_argument("--values", action="store_true", help="read every number and count those that are not finite")

    words = "write a Hugging Face folder anew, in another dtype, in other shards, or with an adapter merged in"
    one = commands.add_parser("convert", help=words, description=_sentence(words))
    one.set_defaults(run=write, parser=one)
    one.add_argument("source", metavar="SRC")
    one.add_argument("out", metavar="OUT")
    one.add_argument("--dtype", choices=("source", "float32", "bfloat16"), default="source", help="of floating tensors")
    one.add_argument("--shard-size", default="5GB", metavar="SIZE", help="most bytes in a file (default 5GB)")
    # repeated, argparse would take the last one alone
    words = "a folder that PEFT or a run wrote"
    one.add_argument("--merge", action="append", default=[], metavar="ADAPTER", help=words)
    return parser


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _add_pattern(one: argparse.ArgumentParser, words: str) -> None:
    one.add_argument("--pattern", action="append", default=[], metavar="GLOB", help=f"{words} (may be repeated)")
