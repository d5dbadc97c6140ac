"""The specifications of all algorithms on a real model: SmolLM2-135M-Instruct, two steps each, with figures.

    python tests/smollm2.py FOLDER                             makes the folder, once
    python tests/parity/smollm2_algorithms.py FOLDER [NAME..]  prints a line per finding; exits with 1 when a bound is broken

Every specification keeps its phases and is pointed at the folder, with its tokenizer. NAME is one of the runs below.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.parity.smollm2 import Finding, trained  # noqa: E402

SMALL = ["phases.0.steps=1", "phases.0.batch.rows=8", "phases.0.optimizers.0.lr=1e-5"]


@attrs.frozen
class Run:
    """A specification and what is changed in it: the model is another, and there are two steps of the algorithm."""

    spec: str
    phase: str
    changes: tuple[str, ...] = ()


def drawn(name: str, *more: str) -> tuple[str, ...]:
    at = f"phases.{name}"
    reward = f"{at}.rewards.0.function=tests.parity.rewards_example:right_and_short"
    data = f'{at}.data=[{{"kind": "jsonl", "path": "specs/data/questions.jsonl"}}]'
    own = (f"{at}.steps=2", f"{at}.batch.rows=2", f"{at}.batch.max_length=256", f"{at}.optimizers.0.lr=1e-6")
    return (*own, f"{at}.algorithm.samples=4", f"{at}.algorithm.sampling.max_tokens=24", data, reward, *more)


RUNS = {
    "dpo": Run(
        "dpo",
        "dpo",
        (
            "phases.dpo.epochs=0",
            "phases.dpo.steps=2",
            "phases.dpo.optimizers.0.lr=1e-5",
            "phases.dpo.optimizers.0.schedule.min_lr=1e-6",
        ),
    ),
    "gspo": Run("gspo", "gspo", drawn("gspo", "phases.gspo.algorithm.kl_coef=0.01")),
    "rloo": Run(
        "gspo",
        "gspo",
        drawn(
            "gspo",
            'phases.gspo.algorithm={"kind": "grpo", "baseline": "leave_one_out", "scale": "none", "kl_coef": 0.01}',
            "phases.gspo.algorithm.samples=4",
            "phases.gspo.algorithm.sampling.max_tokens=24",
        ),
    ),
    "ppo": Run("ppo", "ppo", drawn("ppo", "phases.ppo.algorithm.critic.warmup=0")),
    "ppo, adapters": Run(
        "ppo",
        "ppo",
        drawn("ppo", "phases.ppo.algorithm.critic.warmup=0", "finetune=lora", "phases.ppo.optimizers.0.lr=1e-4"),
    ),
    "muon": Run(
        "muon",
        "sft",
        ("phases.sft.steps=2", "phases.sft.optimizers.0.lr=1e-4", "phases.sft.optimizers.0.adamw.lr=1e-6"),
    ),
}


def findings(name: str, run: Run, folder: Path, out: Path) -> Iterator[Finding]:
    """What a run left behind, held against what must be so in its first two steps."""
    changes = [f'model={{"kind": "hf", "path": "{folder}"}}', "tokenizer=null"]
    changes += [change for change in SMALL if run.phase != "sft"] + list(run.changes)
    whole = "finetune=lora" not in run.changes
    lines = yield from trained(run.spec, folder, out, changes, whole=whole)
    steps = [line for line in lines if line["phase"] == run.phase and "time/step" in line]
    losses = ", ".join(f"{line['train/loss']:.5f}" for line in steps)
    yield Finding(
        f"{name}: losses", losses, len(steps) == 2 and all(math.isfinite(line["train/loss"]) for line in steps)
    )
    yield from _of_pairs(name, steps) if run.phase == "dpo" else ()
    yield from _of_samples(name, steps) if "rollout/reward_mean" in steps[0] else ()
    if "critic/loss" in steps[0]:
        told = ", ".join(f"{line['critic/loss']:.5f}" for line in steps)
        yield Finding(f"{name}: losses of the critic", told, all(line["critic/grad_norm"] > 0 for line in steps))


def _of_pairs(name: str, steps: list[dict[str, Any]]) -> Iterator[Finding]:
    gap = abs(steps[0]["train/loss"] - math.log(2))
    yield Finding(f"{name}: the first loss is ln 2", f"{steps[0]['train/loss']:.7f}", gap <= 1e-6)
    yield Finding(f"{name}: margin", f"{steps[-1]['dpo/margin']:.4f}", steps[-1]["dpo/margin"] != 0)


def _of_samples(name: str, steps: list[dict[str, Any]]) -> Iterator[Finding]:
    for line in steps:
        gap = line["train/logp_diff_max"]
        updates = "with the parameters of the second of two updates" if gap > 1e-4 else ""
        yield Finding(
            f"{name}: step {line['step']}",
            f"reward {line['rollout/reward_mean']:.3f}, logp_diff_max {gap:.1e} {updates}",
        )
    kl = [line["train/kl"] for line in steps]
    yield Finding(f"{name}: KL to the phase's start", ", ".join(f"{x:.1e}" for x in kl), abs(kl[0]) <= 1e-3)


def main(folder: Path, names: list[str]) -> int:
    """Prints the findings of the named runs, or of all."""
    broken = 0
    for name in names or RUNS:
        with tempfile.TemporaryDirectory() as out:
            for finding in findings(name, RUNS[name], folder.resolve(), Path(out) / "out"):
                print(finding, flush=True)
                broken += not finding.holds
    print(f"{broken} bounds broken" if broken else "every bound holds")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
