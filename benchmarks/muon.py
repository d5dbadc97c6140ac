"""Muon against AdamW: how many steps each needs to the loss at which AdamW ends.

    python -m benchmarks.muon --steps 200 --seeds 3

trains the supervised phase of a specification from each seed, with AdamW at several rates and with Muon, which moves the hidden
matrices while AdamW moves the rest at the same several rates. It compares the best of each: the losses are means over 10 steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import msgspec

import areno_fn as af
from areno_fn.contracts.spec import AdamWSpec, MuonSpec, OptimizerSpec, Remainder, RunSpec, Schedule
from benchmarks import needs

WINDOW = 10


def losses(spec: RunSpec, optimizer: OptimizerSpec, steps: int, seed: int) -> list[float]:
    """The loss of every step of the first phase."""
    phase = msgspec.structs.replace(spec.phases[0], steps=steps, epochs=0, stop_at=0.0, optimizers=[optimizer])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        one = msgspec.structs.replace(spec, phases=[phase], evaluation=None, seed=seed, out=str(out))
        if af.train(one) != 0:
            raise SystemExit("interrupted")
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def smooth(values: list[float]) -> list[float]:
    """Means over the steps up to each."""
    return [sum(values[max(0, i - WINDOW + 1) : i + 1]) / min(i + 1, WINDOW) for i in range(len(values))]


def first_below(values: list[float], target: float) -> int | None:
    """The 1-based step at which a loss is reached."""
    return next((number for number, value in enumerate(values, 1) if value <= target), None)


def main() -> None:
    """Prints one line a run, and one a seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="specs/quickstart.toml")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--muon", type=float, default=0.02, help="Muon's rate for hidden matrices")
    options = parser.parse_args()
    spec = af.read_spec(options.spec)
    schedule = Schedule(warmup_steps=min(20, options.steps // 5))
    for seed in range(options.seeds):
        ends: dict[str, list[list[float]]] = {"adamw": [], "muon": []}
        for rate in options.rates:
            adamw = AdamWSpec(lr=rate, betas=(0.9, 0.99), weight_decay=0.0, schedule=schedule)
            rest = Remainder(lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
            muon = MuonSpec(lr=options.muon, weight_decay=0.0, schedule=schedule, adamw=rest)
            for kind, optimizer in (("adamw", adamw), ("muon", muon)):
                found = smooth(losses(spec, optimizer, options.steps, seed))
                ends[kind].append(found)
                print(f"seed {seed} {kind:5} rate {rate:g}: loss {found[-1]:.4f}", flush=True)
        best = {kind: min(runs, key=lambda run: run[-1]) for kind, runs in ends.items()}
        reached = first_below(best["muon"], best["adamw"][-1])
        print(
            f"seed {seed}: AdamW ends at {best['adamw'][-1]:.4f} after {options.steps} steps, Muon is there after {reached}"
        )


if __name__ == "__main__":
    needs.run(main)
