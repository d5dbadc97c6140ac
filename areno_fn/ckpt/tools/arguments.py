"""The command line of the tools; what a command needs is imported when it runs, so that help answers at once."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

_MEASURE = "relative difference = ||a - b|| / max(||a||, 1.2e-38) over the finite elements of a tensor, in float64"
_WHAT = (
    "A checkpoint is a Hugging Face folder (one file, or shards and an index), a folder of resumable state (step-...), "
    "a PEFT adapter, or one .safetensors file."
)


def command(arguments: Sequence[str]) -> int:
    """Runs one subcommand and returns its exit code."""
    options, strange = _parser().parse_known_args(list(arguments))
    if strange:  # argparse itself would show how the command above is used
        options.parser.error(f"unrecognized arguments: {' '.join(strange)}")
    commands = importlib.import_module("areno_fn.ckpt.tools.commands")
    code: int = getattr(commands, options.run)(options)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m areno_fn.ckpt", description="Compare, inspect, verify and convert checkpoints.", epilog=_WHAT
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    words = "say in what two checkpoints differ; exit code 0: in nothing, 1: in something, 2: one cannot be read"
    one = commands.add_parser("diff", help=words, description=_sentence(words), epilog=f"{_MEASURE}. {_WHAT}")
    one.set_defaults(run="diff", parser=one)
    one.add_argument("a", metavar="A")
    one.add_argument("b", metavar="B")
    _add_pattern(one, "compare only tensors whose names match")
    one.add_argument("--top", type=int, default=20, metavar="K", help="lines of each list (default 20; 0 shows all)")
    one.add_argument("--device", default="cpu", metavar="D", help="where numbers are compared (default cpu)")

    words = "say what a checkpoint is, from its headers alone"
    one = commands.add_parser("inspect", help=words, description=_sentence(words), epilog=_WHAT)
    one.set_defaults(run="show", parser=one)
    one.add_argument("dir", metavar="DIR")
    one.add_argument("--tensors", action="store_true", help="list the tensors")
    _add_pattern(one, "list only tensors whose names match")
    one.add_argument("--json", action="store_true", help="print an object instead of text")

    words = (
        "check everything that can be checked without a run; exit code 0: whole, 1: problems, 2: it is no checkpoint"
    )
    one = commands.add_parser("verify", help=words, description=_sentence(words), epilog=_WHAT)
    one.set_defaults(run="verify", parser=one)
    one.add_argument("dir", metavar="DIR")
    one.add_argument("--hash", action="store_true", help="print the SHA-256 of every file, as sha256sum does")
    one.add_argument("--values", action="store_true", help="read every number and count those that are not finite")

    words = "write a Hugging Face folder anew, in another dtype, in other shards, or with an adapter merged in"
    one = commands.add_parser("convert", help=words, description=_sentence(words))
    one.set_defaults(run="write", parser=one)
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
