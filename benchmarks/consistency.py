"""What a rollout and training have in common in either mode of consistency, and what the bitwise one costs.

    python -m benchmarks.consistency [--shape qwen3-0.6b | tiny] [--sequences 256] [--prompt 128] [--new 256] [--repeats 3]
                                     [--micro 16384] [--seconds 600] [--parts apart times] [--json out.json]

First 64 prompts of ragged lengths are continued by 64 tokens each in three batch compositions (all at once, in seven lanes,
in the opposite order in 23 lanes), and scored by training in three packings. Then a whole iteration is timed: a rollout, and
one update of the clipped surrogate with AdamW. Random weights in bf16, no stop token, temperature 1. Both modes take turns in one
process; times are medians with half the distance between the quartiles, or between the extremes of fewer than four.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import attrs
import torch

import areno_fn as af
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.steps.token.experience import experience
from areno_fn.steps.token.paged_rollout import PagedSampler
from areno_fn.steps.token.score import act
from benchmarks import needs
from benchmarks.train_step import SHAPES

MODES, PARTS = ("ordinary", "bitwise"), ("apart", "times")
COMPOSITIONS = ((None, 32, False), (7, 16, False), (23, 32, True))
"""Lanes, tokens a page, and whether the prompts come in the opposite order."""
PACKINGS = (16384, 3000, 700)


def main() -> None:
    """Prints the differences, then the times and their ratio."""
    options = _options()
    needs.room(options.shape, "--shape")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {options.shape}, {dtype}", flush=True)
    family = af.FAMILIES["qwen3"]
    config = family.config_from_hf({"model_type": "qwen3", **SHAPES[options.shape]})
    params = family.init(config, af.Key.of(0), dtype=dtype, device=device)
    policies = {mode: attrs.evolve(family.policy(config), consistency=mode) for mode in MODES}
    found = {mode: _apart(policies[mode], params, device) for mode in MODES if "apart" in options.parts}
    for mode, line in found.items():
        print(
            f"{mode}: {line['tokens']} tokens in {len(COMPOSITIONS)} compositions: tokens alike {line['tokens_alike']}, "
            f"log-probabilities alike {line['logp_alike']}; |recorded - recomputed| in {len(PACKINGS)} packings at most "
            f"{line['max']:.3g}, mean {line['mean']:.3g}",
            flush=True,
        )
    times = _times(options, policies, params, device) if "times" in options.parts else {}
    for part in ("rollout", "training", "iteration") if times else ():
        shown = {mode: f"{times[mode][part][0] * 1e3:.1f} +- {times[mode][part][1] * 1e3:.1f} ms" for mode in MODES}
        factor = times["bitwise"][part][0] / times["ordinary"][part][0]
        print(f"{part}: ordinary {shown['ordinary']}, bitwise {shown['bitwise']}, factor {factor:.3f}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": name, "options": vars(options), "apart": found, "times": times}, file, indent=1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--micro", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--seconds", type=float, default=600, help="after so many no further repeat is begun")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json")
    return parser.parse_args()


def _prompts(policy: Any, lengths: torch.Tensor, device: torch.device) -> af.Prompts:
    count, source = len(lengths), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, policy.vocab_size, (count, int(lengths.max())), generator=source)
    return af.tree.map(lambda x: x.to(device), af.Prompts(tokens=tokens, lengths=lengths, ids=torch.arange(count)))


def _apart(policy: Any, params: Any, device: torch.device) -> dict[str, Any]:
    """How far recorded log-probabilities are from recomputed ones, and whether compositions agree with each other."""
    lengths = torch.randint(20, 129, (64,), generator=torch.Generator().manual_seed(1))
    prompts, sampling = _prompts(policy, lengths, device), af.Sampling(max_tokens=64)
    results, off = [], []
    for rows, page, turned in COMPOSITIONS:
        given = af.tree.map(lambda x, turned=turned: x.flip(0) if turned else x, prompts)
        drawn = PagedSampler(policy, (), page_size=page)(params, given, af.Key.of(1), sampling, max_rows=rows)
        results.append(af.tree.map(lambda x, turned=turned: x.flip(0) if turned else x, drawn))
        for micro in PACKINGS:
            for batch in experience(drawn, torch.zeros(64, device=device), micro_tokens=micro):
                with torch.no_grad():
                    off.append((act(policy, sampling)(params, batch).logp - batch.old).abs())
    apart = torch.cat(off)
    return {
        "tokens": int(results[0].lengths.sum()),
        "tokens_alike": all(torch.equal(one.tokens, results[0].tokens) for one in results),
        "logp_alike": all(torch.equal(one.logp, results[0].logp) for one in results),
        "max": float(apart.max()),
        "mean": float(apart.mean()),
    }


def _times(
    options: argparse.Namespace, policies: dict[str, Any], params: Any, device: torch.device
) -> dict[str, dict[str, tuple[float, float]]]:
    """Seconds of a rollout, of an update, and of both, by mode: median and spread."""
    sampling = af.Sampling(max_tokens=options.new)
    lengths = torch.full((options.sequences,), options.prompt)
    prompts = _prompts(policies["ordinary"], lengths, device)
    advantages = torch.linspace(-1, 1, options.sequences, device=device)
    optimizer = af.adamw(AdamWSpec(lr=1e-6), total_steps=1000)
    rollouts = {mode: PagedSampler(policy, ()) for mode, policy in policies.items()}
    updates = {
        mode: af.train_step(af.pipeline(act(policy, sampling), af.clipped()), optimizer)
        for mode, policy in policies.items()
    }
    state = af.TrainState(
        params={"actor": params},
        optim={"actor": optimizer.init(params)},
        snapshots={},
        counters=af.Counters(),
        key=af.Key.of(0),
        cursor=af.Cursor(),
    )
    seconds: dict[str, dict[str, list[float]]] = {mode: {"rollout": [], "training": []} for mode in policies}
    begun = time.perf_counter()
    for number in range(options.repeats + 1):  # the first compiles and captures
        if number > 1 and time.perf_counter() - begun > options.seconds:
            break
        for mode in policies:
            marks = [_now(device)]
            drawn = rollouts[mode](state.params["actor"], prompts, af.Key.of(number), sampling)
            marks.append(_now(device))
            state, metrics = updates[mode](state, experience(drawn, advantages, micro_tokens=options.micro))
            marks.append(_now(device))
            print(
                f"  {mode} {number}: rollout {marks[1] - marks[0]:.3f} s, training {marks[2] - marks[1]:.3f} s, "
                f"logp_diff_max {metrics['train/logp_diff_max']:.3g}",
                flush=True,
            )
            if number:
                seconds[mode]["rollout"].append(marks[1] - marks[0])
                seconds[mode]["training"].append(marks[2] - marks[1])
    for own in seconds.values():
        own["iteration"] = [a + b for a, b in zip(own["rollout"], own["training"], strict=True)]
    return {mode: {part: _middle(values) for part, values in own.items()} for mode, own in seconds.items()}


def _middle(values: list[float]) -> tuple[float, float]:
    if len(values) < 4:
        return statistics.median(values), (max(values) - min(values)) / 2
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, (high - low) / 2


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    needs.run(main)
