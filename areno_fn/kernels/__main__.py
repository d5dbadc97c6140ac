"""`python -m areno_fn.kernels`: what kernels there are, where they are tested, and what they last took."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from areno_fn.command import main
from areno_fn.contracts.errors import KernelError


def command(arguments: Sequence[str]) -> int:
    """Prints a paragraph for each kernel, or for those that are named.

    Raises:
        KernelError: there is no kernel of a name.
    """
    parser = argparse.ArgumentParser(
        prog="python -m areno_fn.kernels",
        description="What kernels there are, where they are tested, and what they last took.",
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="of these alone")
    names = parser.parse_args(arguments).names
    from areno_fn.kernels.registry import every_kernel, text  # which imports all of them

    found = {kernel.name: kernel for kernel in every_kernel()}
    for name in names:
        if name not in found:
            near = get_close_matches(name, found, n=1)
            hint = f"the nearest is {near[0]!r}" if near else f"there are {', '.join(found)}"
            raise KernelError(f"there is no kernel {name!r}; {hint}")
    print(text(tuple(found[name] for name in names or found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(command))
