"""Does a generator of 4 steps draw what its teacher draws in 50? Three seeds each, on digits, on CPUs.

    python -m benchmarks.distillation --seeds 3 --jobs 2 --out out/distillation

Runs `specs/flow_dmd2.toml` and `specs/flow_tdm.toml` and prints how often a classifier reads what was asked for, and in brackets
how far pictures of one class lie apart: of the teacher in 50 steps, of the teacher in 4, which is where the generator begins,
and of the generator. Classes and keys are the same in all evaluations of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import needs

NAMES = ("flow_dmd2", "flow_tdm")
SPECS = Path(__file__).resolve().parents[1] / "specs"
COLUMNS = ("run", "seed", "teacher, 50 steps", "teacher, 4", "generator, 4", "of the teacher's", "seconds")


def carried_out(name: str, seed: int, out: Path) -> dict[str, Any]:
    """Runs a specification in a process of its own; what is there already is not done again."""
    folder = out / f"{name}-{seed}"
    if not (folder / "summary.json").exists():
        command = [
            sys.executable,
            "-m",
            "areno_fn.run",
            str(SPECS / f"{name}.toml"),
            "--out",
            str(folder),
            "--overwrite",
        ]
        command += ["--set", f"seed={seed}", "--set", "device=cpu"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{folder.name}: {done.stderr}")
    return measured(name, seed, folder)


def measured(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """What the evaluations of a run found: at the end of the teacher's phase, and around the generator's."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "eval/recognised" in line]
    last = found[-1]["phase"]
    teacher = [line for line in found if line["phase"] != last][-1]
    own = [line for line in found if line["phase"] == last]
    seconds = sum(line.get("time/step", 0.0) for line in lines)
    return {"name": name, "seed": seed, "teacher": teacher, "start": own[0], "end": own[-1], "seconds": seconds}


def shown(row: dict[str, Any]) -> str:
    """A line of the table."""
    pairs = [
        f"{row[key]['eval/recognised']:.3f} ({row[key]['eval/diversity']:.3f})" for key in ("teacher", "start", "end")
    ]
    share = row["end"]["eval/recognised"] / row["teacher"]["eval/recognised"]
    return f"| {row['name']} | {row['seed']} | {' | '.join(pairs)} | {share:.1%} | {row['seconds']:.0f} |"


def main() -> None:
    """Runs what is missing and prints the table: accuracy, and in brackets diversity."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("out/distillation"))
    given = parser.parse_args()
    asked = [(name, seed) for seed in range(given.seeds) for name in NAMES]
    with ThreadPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(lambda one: carried_out(*one, given.out), asked))
    print(f"| {' | '.join(COLUMNS)} |\n| {' | '.join('---' for _ in COLUMNS)} |")
    for row in sorted(rows, key=lambda row: (row["name"], row["seed"])):
        print(shown(row))


if __name__ == "__main__":
    needs.run(main)
