"""Does every algorithm learn? Three seeds each, on the model and the task of the quickstart, on CPUs.

    python -m benchmarks.learning --seeds 3 --jobs 2 --out out/learning --plot docs/learning.png

GRPO, GSPO, RLOO, REINFORCE++ and PPO each begin where the supervised phase stops, and are scored by exact match on held-out
sums; the rise is over their own phase. DPO is trained on pairs of a right and a wrong sum, and scored on held-out pairs,
against the model it began from: mean margin, and the fraction whose right sum has the larger implicit reward.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

import areno_fn as af
from areno_fn.contracts.batch import Pair
from areno_fn.contracts.spec import (
    DPO,
    GRPO,
    GSPO,
    PPO,
    AdamWSpec,
    AlgorithmSpec,
    ArithmeticData,
    HFModel,
    JsonlData,
    Phase,
    RunSpec,
    Sampling,
    Schedule,
)
from areno_fn.engine.specfile import write
from areno_fn.steps.compose import add_sums, finish, pipeline
from areno_fn.steps.token.score import reference_logp
from areno_fn.world.data import read_all
from areno_fn.world.preferences import encode_pairs
from areno_fn.world.tokenizer_bytes import ByteTokenizer
from benchmarks import needs

DRAWN = {"samples": 8, "minibatches": 2, "sampling": Sampling(max_tokens=5)}
ALGORITHMS: dict[str, AlgorithmSpec] = {
    "grpo": GRPO(**DRAWN),
    "gspo": GSPO(**DRAWN, clip_low=3e-3, clip_high=4e-3),
    "rloo": GRPO(**DRAWN, baseline="leave_one_out", scale="none"),
    "reinforce_pp": GRPO(**DRAWN, baseline="batch", scale="batch"),
    "ppo": PPO(**DRAWN),
}
COLORS = {"grpo": "#2563eb", "gspo": "#16a34a", "rloo": "#ea580c", "reinforce_pp": "#9333ea", "ppo": "#dc2626"}
MARGIN, ACCURACY = "dpo/margin", "dpo/accuracy"


def sampled(name: str, base: RunSpec, steps: int) -> RunSpec:
    """The quickstart with another algorithm in its second phase."""
    sft, grpo = base.phases
    adamw = {
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
        "schedule": Schedule(kind="linear", warmup_steps=5, min_lr=4e-5),
    }
    optimizers = [AdamWSpec(lr=4e-4, **adamw)]
    if name == "ppo":
        optimizers.append(AdamWSpec(role="critic", lr=1e-3, **adamw))
    phase = msgspec.structs.replace(grpo, algorithm=ALGORITHMS[name], optimizers=optimizers, steps=steps)
    return msgspec.structs.replace(base, phases=[sft, phase], name=name)


def preferred(start: Path, pairs: Path, base: RunSpec) -> RunSpec:
    """DPO from a trained model."""
    adamw = AdamWSpec(lr=3e-4, weight_decay=0.0, schedule=Schedule(kind="linear", warmup_steps=5, min_lr=3e-5))
    data = [JsonlData(path=str(pairs))]
    batch = msgspec.structs.replace(base.phases[0].batch, rows=64)
    phase = Phase(name="dpo", algorithm=DPO(), data=data, epochs=2, batch=batch, optimizers=[adamw])
    return msgspec.structs.replace(base, model=HFModel(path=str(start)), tokenizer=None, phases=[phase], name="dpo")


def carried_out(spec: RunSpec, out: Path, threads: int) -> dict[str, Any]:
    """Runs a specification in a process of its own; what is there already is not done again."""
    if not (out / "summary.json").exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        path = out.with_suffix(".yaml")
        write(msgspec.structs.replace(spec, out=str(out), device="cpu"), path)
        command = [sys.executable, "-m", "areno_fn.run", str(path), "--overwrite"]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{out.name}: {done.stderr}")
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def write_pairs(path: Path, split: str, count: int) -> Path:
    """Sums with the right result and one that is off by one digit, from a split of the task."""
    rows = []
    for number, row in enumerate(read_all([ArithmeticData(digits=2, count=count, split=split)])):
        right = row["answer"]
        place = number % len(right)
        digit = (int(right[place]) + 1 + number % 9) % 10
        wrong = f"{right[:place]}{digit}{right[place + 1 :]}"
        rows.append({"prompt": row["prompt"], "chosen": right, "rejected": wrong})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def held_out(start: Path, end: Path, pairs: Sequence[Pair]) -> dict[str, float]:
    """What DPO reports of pairs that it was not trained on, before and after."""
    model, before = af.load_hf(start)
    _, after = af.load_hf(end)
    refer = reference_logp(model.policy, Sampling())
    batches = af.pair_batches(pairs, known(refer, before, pairs), 1 << 16)
    objective = pipeline(af.compare(model.policy, Sampling()), af.preference(0.1))
    sums = [objective(after, batch) for batch in batches]
    total = sums[0]
    for more in sums[1:]:
        total = add_sums(total, more)
    return finish(total)


def known(refer: Any, params: Any, pairs: Sequence[Pair]) -> list[Any]:
    """What the reference says of every pair's decisions."""
    from areno_fn.engine.references import References

    return References(pairs, 1 << 16).of(range(len(pairs)), lambda packed: refer(params, packed))


def main() -> None:
    """Prints a line a run, and draws the curves of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="of reinforcement learning")
    parser.add_argument("--only", nargs="+", choices=[*ALGORITHMS, "dpo"], default=[*ALGORITHMS, "dpo"])
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--threads", type=int, default=1, help="of each")
    parser.add_argument("--out", type=Path, default=Path("out/learning"))
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    base = af.read_spec("specs/quickstart.toml")
    options.out.mkdir(parents=True, exist_ok=True)
    train, test = (
        write_pairs(options.out / f"{split}.jsonl", split, n) for split, n in (("train", 4000), ("heldout", 512))
    )

    def one(job: tuple[str, int]) -> str:
        name, seed = job
        seeded = msgspec.structs.replace(base, seed=seed)
        out = options.out / f"{name}-{seed}"
        if name != "dpo":
            last = carried_out(sampled(name, seeded, options.steps), out, options.threads)["phases"][-1]
            before, after = last["eval_start"], last["eval_end"]
            return (
                f"{name:11} seed {seed}: exact match {before:.3f} -> {after:.3f}, rise {after - before:+.3f}, "
                f"{last['steps']} steps in {last['seconds']:.0f} s"
            )
        start = options.out / f"sft-{seed}"
        carried_out(msgspec.structs.replace(seeded, phases=base.phases[:1]), start, options.threads)
        carried_out(preferred(start / "export", train, seeded), out, options.threads)
        pairs = encode_pairs(read_all([JsonlData(path=str(test))]), ByteTokenizer(), 64, "error")
        told = held_out(start / "export", out / "export", pairs)
        return f"dpo         seed {seed}: held-out pairs, margin 0 -> {told[MARGIN]:.2f}, accuracy {told[ACCURACY]:.3f}"

    jobs = [(name, seed) for name in options.only for seed in range(options.seeds)]
    with ThreadPoolExecutor(options.jobs) as pool:
        for line in pool.map(one, jobs):
            print(line, flush=True)
    if options.plot:
        draw(options.out, jobs, options.plot)


def draw(folder: Path, jobs: Sequence[tuple[str, int]], picture: Path) -> None:
    """Evaluations of the sampled algorithms and margins of DPO, over the steps of their phase."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    scores, margins = figure.subplots(1, 2)
    for name, seed in jobs:
        lines = [json.loads(line) for line in (folder / f"{name}-{seed}/metrics.jsonl").read_text().splitlines()]
        key, axes = (MARGIN, margins) if name == "dpo" else ("eval/score", scores)
        own = [line for line in lines if line["phase"] == ("dpo" if name == "dpo" else "grpo") and key in line]
        steps = [line["step"] - own[0]["step"] for line in own]
        label = name if seed == 0 else None
        axes.plot(steps, [line[key] for line in own], color=COLORS.get(name, "#0d9488"), linewidth=1.4, label=label)
    for axes, title in ((scores, "held-out exact match"), (margins, "DPO: margin of the training pairs")):
        axes.set_title(title)
        axes.set_xlabel("steps of the phase")
        axes.grid(color="#e2e8f0")
        if axes.has_data():
            axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(picture)


if __name__ == "__main__":
    needs.run(main)
