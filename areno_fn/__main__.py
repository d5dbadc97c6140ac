"""`python -m areno_fn`: which commands there are."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from areno_fn.command import main
from areno_fn.contracts.errors import ArenoError

COMMANDS = {
    "run": "train what a specification describes",
    "spec": "start, check, convert and show specifications",
    "check": "say what this machine can do, and why not",
    "ckpt": "compare, inspect, verify and convert checkpoints",
    "kernels": "list the kernels, where they are tested, and what they last took",
}
"""The modules of the package that are commands, and what each is for."""


def command(arguments: Sequence[str]) -> int:
    """Prints the commands.

    Raises:
        ArenoError: there are arguments, which only one of the commands could take.
    """
    names = [f"python -m areno_fn.{name}" for name in COMMANDS]
    if arguments and arguments[0] not in ("-h", "--help"):
        raise ArenoError(
            f"areno_fn takes no arguments, received {' '.join(arguments)}; the commands are {', '.join(names)}"
        )
    width = max(map(len, names))
    for name, words in zip(names, COMMANDS.values(), strict=True):
        print(f"{name:<{width}}  {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main(command))
