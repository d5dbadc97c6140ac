"""Updates that are captured beside those that are not: the time of a run's steps and what it takes of the memory.

    python -m benchmarks.captured [--hidden 576 --layers 30 --vocab 49152] [--steps 60] [--algorithms sft grpo] [--json out.json]

A random model of the shape of SmolLM2-135M in bfloat16 is trained by whole specifications, on texts of ragged lengths, of which
only `phases.capture` differs. The second half of the steps counts, median and half the distance between the quartiles: in the
first half shapes are seen for the first time and captured. `train` is the time of the updates alone, `step` that of all. The
prediction leaves out what draws samples.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch

import areno_fn as af
from areno_fn.contracts.spec import ByteTokenizer, RunSpec
from areno_fn.engine.foreseen import foreseen
from benchmarks import needs

ROWS = 512


def brief(row: dict[str, Any], completion: str) -> float:
    """The share of spaces, a reward that any model can move."""
    del row
    return completion.count(" ") / max(1, len(completion))


def texts(path: Path) -> Path:
    """Prompts of 8 to 40 and answers of 40 to 200 bytes, a row a line."""
    source = torch.Generator().manual_seed(0)
    lengths = torch.stack(
        [torch.randint(8, 40, (ROWS,), generator=source), torch.randint(40, 200, (ROWS,), generator=source)]
    )
    rows = [{"prompt": "ab " * (p // 3), "response": "cd " * (a // 3)} for p, a in lengths.T.tolist()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def model(options: argparse.Namespace, folder: Path) -> Path:
    """A folder with a random model in float32, which a run of one step leaves."""
    config = {
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "intermediate_size": options.hidden * 8 // 3 // 64 * 64,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64,
        "num_key_value_heads": max(1, options.hidden // 192),
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    run(specification(options, {"kind": "scratch", "family": "qwen3", "config": config}, folder, "sft", False, steps=1))
    return folder / "start" / "export"


def specification(
    options: argparse.Namespace, start: dict[str, Any], folder: Path, algorithm: str, capture: bool, steps: int
) -> RunSpec:
    """One phase."""
    kinds: dict[str, dict[str, Any]] = {
        "sft": {"kind": "sft"},
        "grpo": {
            "kind": "grpo",
            "samples": 8,
            "minibatches": 4,
            "kl_coef": 0.01,
            "sampling": {"max_tokens": options.tokens},
        },
    }
    rewards = [{"kind": "function", "function": "benchmarks.captured:brief"}] if algorithm != "sft" else []
    phase = {
        "name": algorithm,
        "steps": steps,
        "capture": capture,
        "algorithm": kinds[algorithm],
        "data": [{"kind": "jsonl", "path": str(texts(folder / "texts.jsonl"))}],
        "batch": {"rows": options.rows, "micro_tokens": options.micro_tokens, "max_length": 256},
        "optimizers": [{"kind": "adamw", "lr": 1e-4}],
        "rewards": rewards,
    }
    found: RunSpec = msgspec.convert(
        {
            "out": str(folder / (f"{algorithm}-{capture}" if start["kind"] == "hf" else "start")),
            "device": options.device,
            "model": start,
            "tokenizer": {"kind": ByteTokenizer.__struct_config__.tag},
            "phases": [phase],
            "log": {"tensorboard": False, "samples": 0},
        },
        RunSpec,
    )
    return found


def run(spec: RunSpec) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if af.train(spec, overwrite=True) != 0:
            raise SystemExit("interrupted")
    return [json.loads(line) for line in (Path(spec.out) / "metrics.jsonl").read_text().splitlines()]


def predicted(spec: RunSpec) -> float | None:
    """The most that a step takes by the account of a dry run."""
    made = af.plan(spec)
    found = foreseen(made, made.phases[0].spec)
    return None if found is None else found.total / 1e9


def told(spec: RunSpec) -> dict[str, Any]:
    """What a run took."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    lines = run(spec)
    late = lines[len(lines) // 2 :]
    found: dict[str, Any] = {
        "allocated_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if cuda else None,
        "predicted_gb": predicted(spec),
        "loss": lines[-1]["train/loss"],
    }
    for name in ("time/train", "time/step"):
        values = [line[name] * 1e3 for line in late if name in line]
        if len(values) > 1:
            low, middle, high = statistics.quantiles(values, n=4)
            found[name] = {"ms": middle, "spread": (high - low) / 2, "slowest": max(values)}
    return found


def main() -> None:
    """Prints a line a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of a completion")
    parser.add_argument("--micro-tokens", type=int, default=8192)
    parser.add_argument("--algorithms", nargs="+", choices=("sft", "grpo"), default=["sft", "grpo"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--without", action="store_true", help="run what is not captured alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.hidden < 64 or options.hidden % 64 or options.vocab < 259:
        parser.error(
            f"--hidden must be a multiple of 64 and --vocab at least 259, received {options.hidden} and {options.vocab}"
        )
    if options.device == "cuda" or not options.without:
        needs.gpu("an update that is captured", "--device cpu --without times those that are not")
    results = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        start = {"kind": "hf", "path": str(model(options, folder)), "dtype": "bfloat16"}
        for algorithm in options.algorithms:
            for capture in (False,) if options.without else (False, True):
                spec = specification(options, start, folder, algorithm, capture, options.steps)
                results.append({"algorithm": algorithm, "capture": capture, **told(spec)})
                print(json.dumps(results[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    needs.run(main)
