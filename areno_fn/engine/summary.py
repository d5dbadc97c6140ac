"""`summary.json`: what each phase did, read back from metrics.jsonl so that an interrupted run sums up whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from areno_fn.contracts.spec import RunSpec


def summarise(spec: RunSpec, metrics: Path, rewards: Sequence[str] = ()) -> dict[str, Any]:
    """The seed and one entry per phase that has begun.

    Args:
        spec: the run.
        metrics: its metrics.jsonl.
        rewards: the names of what its evaluations ask.

    Returns:
        `seed` and `phases`, each with `name`, `algorithm`, `steps`, `seconds` (of all its steps together), `eval_seconds` (of
        its evaluations), `eval_rewards` (whose weighted sum follows), `eval_start` and `eval_end` (that sum before the first
        step and behind the last, None where there was none). Start-up, checkpoints and export are in neither time.
    """
    lines = [msgspec.json.decode(line) for line in metrics.read_bytes().splitlines() if line.strip()]
    phases = [_phase(phase.name, str(phase.algorithm.__struct_config__.tag), lines, rewards) for phase in spec.phases]
    return {"seed": spec.seed, "phases": [phase for phase in phases if phase is not None]}


def write(spec: RunSpec, metrics: Path, path: Path, rewards: Sequence[str] = ()) -> dict[str, Any]:
    """Writes the summary beside its final name and renames it; returns it."""
    summary = summarise(spec, metrics, rewards)
    beside = path.with_suffix(".json.partial")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    beside.replace(path)
    return summary


def _phase(name: str, algorithm: str, lines: Sequence[dict[str, Any]], rewards: Sequence[str]) -> dict[str, Any] | None:
    own = [line for line in lines if line.get("phase") == name]
    if not own:
        return None
    steps = [line for line in own if "time/step" in line]
    scores = [line["eval/score"] for line in own if "eval/score" in line]
    return {
        "name": name,
        "algorithm": algorithm,
        "steps": len(steps),
        "seconds": round(sum(line["time/step"] for line in steps), 3),
        "eval_seconds": round(sum(line.get("time/evaluation", 0.0) for line in own), 3),
        "eval_rewards": list(rewards),
        "eval_start": scores[0] if scores else None,
        "eval_end": scores[-1] if len(scores) > 1 else None,
    }
