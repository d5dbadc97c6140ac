"""`python -m areno_fn.run SPEC`: from a specification to a trained checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from areno_fn.command import main, note
from areno_fn.engine.specfile import read


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m areno_fn.run", description="Train what a specification describes.")
    parser.add_argument("spec", metavar="SPEC", help="a .msgpack, .toml, .yaml or .json specification")
    parser.add_argument(
        "--set", metavar="A.B=V", action="append", default=[], dest="changes", help="replace one field; may be repeated"
    )
    parser.add_argument("--out", metavar="DIR", help="the output folder, instead of the specification's `out`")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in the output folder, on the CPU bit for bit",
    )
    parser.add_argument(
        "--accept",
        metavar="FIELD",
        action="append",
        default=[],
        help="with --resume, go on though phases, data, optimizers or seed have changed; may be repeated",
    )
    parser.add_argument("--overwrite", action="store_true", help="delete the run in the output folder and start afresh")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything up to loading weights and ask each reward once, then stop",
    )
    return parser


def command(arguments: Sequence[str]) -> int:
    """Runs the command line.

    Returns:
        0 when the run is complete, 130 when it was stopped by Ctrl-C behind a checkpoint.
    """
    options = _arguments().parse_args(arguments)
    changes = [*options.changes, *([f"out={options.out}"] if options.out else [])]
    spec = read(options.spec, changes, note)
    # torch is imported only for a specification that decodes: a typing mistake answers at once
    from areno_fn.engine.session import describe, run

    if options.dry_run:
        print(describe(spec, resume=options.resume, overwrite=options.overwrite, accept=options.accept))
        return 0
    return run(spec, resume=options.resume, overwrite=options.overwrite, accept=options.accept)


if __name__ == "__main__":
    sys.exit(main(command))
