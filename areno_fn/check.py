"""`python -m areno_fn.check`: what this machine can do, and why not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areno_fn.command import main

if TYPE_CHECKING:
    from areno_fn.engine.machine import Finding

_MARKS = {True: Text("yes", style="green"), False: Text("no", style="bold red"), None: Text("-", style="dim")}


def command(arguments: Sequence[str]) -> int:
    """Prints the findings as a table, or as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m areno_fn.check", description="What this machine can do, and why not."
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    options = parser.parse_args(list(arguments))
    from areno_fn.engine.machine import findings  # which imports all that it looks at

    found = list(findings())
    if options.json:
        print(json.dumps([attrs.asdict(finding) for finding in found], indent=2))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=160)  # for other programs, one line a finding
        console.print(table(found))
        failed = [finding.name for finding in found if finding.ok is False]
        console.print(f"Failing: {', '.join(failed)}." if failed else "Everything needed is here.", markup=False)
    return 0


def table(found: Sequence[Finding]) -> Table:
    """The findings, one a row."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("", no_wrap=True)
    shown.add_column("what", no_wrap=True)
    shown.add_column("found")
    for finding in found:
        shown.add_row(_MARKS[finding.ok], Text(finding.name), Text(finding.detail))
    return shown


if __name__ == "__main__":
    sys.exit(main(command))
