"""GRPO on a model of Hugging Face, whole: does it learn a stated task, and where does the time of an iteration go?

    python -m benchmarks.grpo_iteration --model models/SmolLM2-135M-Instruct --out out/grpo_iteration
                                        [--steps 40] [--json grpo.json] [--plot docs/grpo_iteration.png]

The task: short right answers. Questions about countries have one-word answers; the reward is a rule, half for an answer that
holds the right word, half for brevity, which falls from 1 at three words to 0 at twenty. Held-out countries are asked about
greedily before and after.
The run is `areno_fn.train` and its own records. An iteration lasts from one line of metrics to the next; what of it is neither
rollout, reward, scoring nor updates is idle. The first iterations, which compile kernels, are told apart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import areno_fn as af
from areno_fn.contracts.spec import (
    GRPO,
    AdamWSpec,
    Batch,
    Evaluation,
    FunctionReward,
    HFModel,
    JsonlData,
    Phase,
    RunSpec,
    Sampling,
    Schedule,
)
from benchmarks import needs

WORDS, MOST = 3, 20
PARTS = {"rollout": "time/rollout", "reward": "time/reward", "scoring": "time/score", "training": "time/train"}
WARM = 5
"""Iterations that compile kernels and capture token steps."""
ASKED = ("What is the capital of {}?", "On which continent is {}?")
COUNTRIES = {
    "Europe": (
        "Austria Vienna, Belgium Brussels, Bulgaria Sofia, Denmark Copenhagen, Finland Helsinki, France Paris, Germany Berlin, "
        "Greece Athens, Hungary Budapest, Ireland Dublin, Italy Rome, Norway Oslo, Poland Warsaw, Portugal Lisbon, "
        "Romania Bucharest, Spain Madrid, Sweden Stockholm"
    ),
    "Asia": "China Beijing, India Delhi, Indonesia Jakarta, Iran Tehran, Japan Tokyo, Thailand Bangkok, Vietnam Hanoi",
    "Africa": "Algeria Algiers, Egypt Cairo, Ghana Accra, Kenya Nairobi, Morocco Rabat, Senegal Dakar, Tunisia Tunis",
    "America": "Argentina Buenos, Canada Ottawa, Chile Santiago, Colombia Bogot, Cuba Havana, Ecuador Quito, Peru Lima",
}
"""Countries and their capitals by continent."""
HELD_OUT = 5
"""Every so many countries there is one that no question of the training asks about."""


def brief(row: Mapping[str, Any], completion: str) -> float:
    """Half for the right word, half for brevity."""
    words = len(completion.split())
    short = min(1.0, max(0.0, (MOST - words) / (MOST - WORDS))) if words else 0.0
    return 0.5 * (row["answer"].lower() in completion.lower()) + 0.5 * short


def write_questions(path: Path, held_out: bool) -> Path:
    """A question a line, with the word that answers it."""
    rows = []
    known = [(*pair.split(), continent) for continent, text in COUNTRIES.items() for pair in text.split(", ")]
    for i, (country, *answers) in enumerate(known):
        if (i % HELD_OUT == 0) is held_out:
            rows += [{"question": q.format(country), "answer": a} for q, a in zip(ASKED, answers, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def specification(options: argparse.Namespace) -> RunSpec:
    """One phase of GRPO."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    train, held_out = (
        str(write_questions(options.out.with_suffix(f".{name}.jsonl"), name == "heldout"))
        for name in ("train", "heldout")
    )
    reward = FunctionReward(function="benchmarks.grpo_iteration:brief", name="brief")
    phase = Phase(
        name="grpo",
        steps=options.steps,
        algorithm=GRPO(
            samples=options.samples,
            clip_high=0.28,
            kl_coef=options.kl,
            sampling=Sampling(max_tokens=options.tokens),
        ),
        data=[JsonlData(path=train)],
        batch=Batch(rows=options.rows, micro_tokens=32768, max_length=256),
        optimizers=[
            AdamWSpec(
                lr=options.lr,
                weight_decay=0.0,
                schedule=Schedule(kind="linear", warmup_steps=3, min_lr=options.lr / 10),
            )
        ],
        rewards=[reward],
    )
    return RunSpec(
        name="grpo-iteration",
        seed=options.seed,
        out=str(options.out),
        device=options.device,
        model=HFModel(path=str(options.model), dtype=options.dtype),
        phases=[phase],
        evaluation=Evaluation(
            data=[JsonlData(path=held_out)],
            rewards=[reward],
            sampling=Sampling(max_tokens=options.tokens, temperature=0.0),
        ),
    )


def shares(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds of an iteration and the share of each part, medians over iterations that follow another.

    Args:
        lines: of `metrics.jsonl`, those of steps alone.
    """
    spans = [(line["time"] - before["time"], line) for before, line in itertools.pairwise(lines)]
    spans = spans[WARM:] or spans
    if not spans:
        return {}
    found = {name: [line.get(key, 0.0) / span for span, line in spans] for name, key in PARTS.items()}
    found["idle"] = [1.0 - sum(parts) for parts in zip(*found.values(), strict=True)]
    return {
        "iterations": len(spans),
        "seconds": statistics.median(span for span, _ in spans),
        "tokens_per_second": statistics.median(line["rollout/tokens_per_s"] for _, line in spans),
        **{name: statistics.median(parts) for name, parts in found.items()},
    }


def main() -> None:
    """Trains, and prints the curve and the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("out/grpo_iteration"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=16, help="prompts of an iteration")
    parser.add_argument("--samples", type=int, default=16, help="completions of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="most of a completion")
    parser.add_argument("--lr", type=float, default=4e-5)
    parser.add_argument("--kl", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    af.train(specification(options), overwrite=True)
    every = [json.loads(line) for line in (options.out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in every if "time/step" in line]
    scores = [line["eval/score"] for line in every if "eval/score" in line]
    curve = [line["rollout/reward_mean"] for line in lines]
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(
        f"{device}, torch {torch.__version__}, {options.rows} x {options.samples} completions of {options.tokens} tokens"
    )
    print("reward of the training samples:", " ".join(f"{reward:.2f}" for reward in curve))
    print(f"held-out questions, greedily: {' -> '.join(f'{score:.3f}' for score in scores)}")
    told = shares(lines)
    print(", ".join(f"{name} {value:.3g}" for name, value in told.items()))
    if options.json:
        found = {"device": device, "curve": curve, "held_out": scores, "shares": told, "lines": lines}
        options.json.write_text(json.dumps(found, indent=1))
    if options.plot:
        draw(curve, told, options.plot)


def draw(curve: Sequence[float], told: Mapping[str, float], picture: Path) -> None:
    """The curve, and the shares of an iteration beside it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(curve) + 1), curve, color="#2563eb", linewidth=1.6)
    left.set(title="mean reward of the samples", xlabel="iteration", ylim=(0, 1.02))
    names = [name for name in (*PARTS, "idle") if name in told]
    bars = right.barh(names, [100 * told[name] for name in names], color="#0d9488")
    right.bar_label(bars, fmt="%.1f %%", padding=3)
    right.set(title=f"share of an iteration, {told.get('seconds', 0.0):.2f} s", xlabel="percent", xlim=(0, 110))
    right.invert_yaxis()
    for axes in (left, right):
        axes.grid(color="#e2e8f0")
        axes.set_axisbelow(True)
    FigureCanvasAgg(figure).print_png(picture)


if __name__ == "__main__":
    needs.run(main)
