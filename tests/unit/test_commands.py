"""What the command line says when no command is named, and whose usage it shows when a command is used wrongly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import areno_fn
from areno_fn import spec
from areno_fn.__main__ import COMMANDS, command
from areno_fn.ckpt.tools import arguments as ckpt
from areno_fn.contracts.errors import ArenoError

PACKAGE = Path(areno_fn.__file__).parent


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    begun = [path for path in PACKAGE.rglob("*.py") if '\nif __name__ == "__main__":' in path.read_text()]
    parts = [path.relative_to(PACKAGE).with_suffix("").parts for path in begun]
    names = {".".join(part for part in own if part != "__main__") for own in parts} - {""}
    assert set(COMMANDS) == names
    assert command([]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"python -m areno_fn.{name}" for name in COMMANDS
    ]


def test_the_package_itself_lists_the_commands() -> None:
    done = subprocess.run([sys.executable, "-m", "areno_fn"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("python -m areno_fn.run ")


def test_the_package_itself_takes_no_arguments() -> None:
    with pytest.raises(
        ArenoError, match="takes no arguments, received run a.toml; the commands are python -m areno_fn.run, "
    ):
        command(["run", "a.toml"])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_answers_before_torch_is_imported(name: str) -> None:
    code = f"""
import runpy, sys
sys.argv = ["it", "--help"]
try:
    runpy.run_module("areno_fn.{name}", run_name="__main__")
except SystemExit as ended:
    print(ended.code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"usage: python -m areno_fn.{name} [-h]") and done.stdout.endswith("\n0 False\n")


@pytest.mark.parametrize(
    ("run", "words", "usage"),
    [
        (spec.command, ["new", "a.toml", "b"], "python -m areno_fn.spec new"),
        (spec.command, ["new"], "python -m areno_fn.spec new"),
        (spec.command, ["show", "a.toml", "--packed"], "python -m areno_fn.spec show"),
        (spec.command, ["frobnicate"], "python -m areno_fn.spec"),
        (ckpt.command, ["diff", "a", "b", "c"], "python -m areno_fn.ckpt diff"),
        (ckpt.command, ["verify", "a", "--top", "3"], "python -m areno_fn.ckpt verify"),
    ],
)
def test_the_usage_is_that_of_the_command_that_was_used_wrongly(
    run: object, words: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(words)  # type: ignore[operator]
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: {usage} [-h]")
    assert f"{usage}: error: " in said
