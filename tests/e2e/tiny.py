"""A run of seconds: what it is asked for, how to start it, and what it left behind, for the tests of this folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from areno_fn.ckpt.header import read_header
from areno_fn.ckpt.manifest import MANIFEST, read_manifest
from areno_fn.ckpt.resume import latest
from areno_fn.ckpt.tensorfile import Reader
from areno_fn.command import main
from areno_fn.run import command

ROOT = Path(__file__).resolve().parents[2]
CLOCKED = ("time", "rollout/tokens_per_s", "flow/pictures_per_s")
"""Fields of metrics.jsonl that tell the time; so do all that begin with `time/`."""

SPEC = """
name = "tiny"
out = "out"
device = "cpu"

[model]
kind = "scratch"
family = "qwen3"

[model.config]
vocab_size = 259
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
max_position_embeddings = 32
tie_word_embeddings = true

[[phases]]
name = "sft"
steps = 4
algorithm = { kind = "sft" }
data = [{ kind = "arithmetic", digits = 1, count = 40 }]
batch = { rows = 8, max_length = 16 }
optimizers = [{ kind = "adamw", lr = 0.003 }]

[[phases]]
name = "grpo"
steps = 4
algorithm = { kind = "grpo", samples = 4, minibatches = 2, kl_coef = 0.1, sampling = { max_tokens = 4 } }
data = [{ kind = "arithmetic", digits = 1, count = 20 }]
batch = { rows = 4, max_length = 16 }
optimizers = [{ kind = "adamw", lr = 0.003 }]
rewards = [{ kind = "function", function = "areno_fn.world.rewards:length_penalty", weight = 0.5, name = "short" }]

[evaluation]
data = [{ kind = "arithmetic", digits = 1, count = 6, split = "heldout" }]
rewards = [{ kind = "function", function = "areno_fn.world.rewards:exact_match" }]
sampling = { max_tokens = 4, temperature = 0.0 }
every = 2

[checkpoint]
every = 2

[log]
tensorboard = false
samples_every = 2
"""


@attrs.frozen
class Done:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def refused(self) -> list[str]:
        """The sentences of a command that was refused."""
        assert (self.code, self.out) == (2, "")
        return [line.removeprefix("error: ") for line in self.err.splitlines()]


def write_spec(folder: Path, text: str = SPEC, name: str = "tiny.toml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def changes(values: Mapping[str, Any]) -> list[str]:
    """`--set` options."""
    return [word for name, value in values.items() for word in ("--set", f"{name}={_text(value)}")]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def run(spec: Path, out: Path, *flags: str, **values: Any) -> Done:
    """The command in this process; in the names of `values` two underscores stand for a dot."""
    named = {name.replace("__", "."): value for name, value in values.items()}
    return in_process([str(spec), "--out", str(out), *flags, *changes(named)])


def in_process(words: Sequence[str]) -> Done:
    """The command with these arguments, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(command, words)
        except SystemExit as left:
            code = int(left.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def popen(words: Sequence[str], cwd: Path) -> subprocess.Popen[str]:
    """The command with these arguments, in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "areno_fn.run", *words],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def in_subprocess(words: Sequence[str], cwd: Path) -> Done:
    """As `in_process`, in a process of its own."""
    with popen(words, cwd) as process:
        out, err = process.communicate(timeout=300)
    return Done(process.returncode, out, err)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def untimed(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, in their order, without what a clock or a speed says."""
    return [
        {name: value for name, value in line.items() if name not in CLOCKED and not name.startswith("time/")}
        for line in lines(path)
    ]


def kinds(path: Path) -> list[tuple[int, str, str]]:
    """Step, phase and kind of every line of metrics.jsonl."""
    return [
        (line["step"], line["phase"], "step" if "time/step" in line else "evaluation" if "eval/score" in line else "?")
        for line in lines(path)
    ]


def last_checkpoint(out: Path) -> Path:
    found = latest(out / "checkpoints")
    assert found is not None
    return found


def state(out: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Everything in the last checkpoint: the bytes of its tensors by file, and all that is not a tensor."""
    folder = last_checkpoint(out)
    manifest = read_manifest(folder)
    data = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}
    assert data.keys() == {file.name for file in manifest.files}
    return data, manifest.values.scalars


def tensors(out: Path) -> dict[str, Any]:
    """The tensors of the last checkpoint by path."""
    headers = [read_header(path) for path in sorted(last_checkpoint(out).glob("*.safetensors"))]
    with Reader() as reader:
        return {name: reader.read(header, name) for header in headers for name in header.entries}


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def difference(one: Path, other: Path) -> str | None:
    """In what two output folders differ, clocks aside; None when they hold the same, bit for bit."""
    if state(one) != state(other):
        return "the last checkpoint"
    if last_checkpoint(one).name != last_checkpoint(other).name:
        return "the step of the last checkpoint"
    if untimed(one / "metrics.jsonl") != untimed(other / "metrics.jsonl"):
        return "metrics.jsonl"
    if (one / "samples.jsonl").read_bytes() != (other / "samples.jsonl").read_bytes():
        return "samples.jsonl"
    if files(one / "export") != files(other / "export"):
        return "export"
    if _timeless(one) != _timeless(other):
        return "summary.json"
    return None


def _timeless(out: Path) -> Any:
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    for phase in summary["phases"]:
        del phase["seconds"], phase["eval_seconds"]
    return summary
