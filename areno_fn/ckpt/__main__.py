"""`python -m areno_fn.ckpt`: compare, inspect, verify and convert checkpoints."""

from __future__ import annotations

import sys

from areno_fn.ckpt.tools.arguments import command
from areno_fn.command import main

if __name__ == "__main__":
    sys.exit(main(command))
