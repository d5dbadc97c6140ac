"""Tokens a second of a rollout, against transformers' `generate` and against what memory allows, in one process.

    python -m benchmarks.rollout [--sequences 256] [--prompt 128] [--new 256] [--samples 1] [--repeats 5]
                                 [--peers static dynamic] [--kernels] [--tune] [--profile] [--json rollout.json]

Random weights in bf16 (float32 on a CPU), no stop token, sampling at temperature 1 from the whole vocabulary. The peer is
`Qwen3ForCausalLM.generate` with the same weights' shape and a static cache, whose decoding transformers compiles. The floor
is what a token step must read, weights once and the keys and values of every sequence, over the rate of a copy measured in
the same process. Times are medians with half the distance between the quartiles.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import areno_fn as af
from areno_fn.kernels.law import Case
from areno_fn.kernels.paged_attention import cases as attention_cases
from areno_fn.kernels.paged_attention import paged_attention
from areno_fn.kernels.sample import cases as sample_cases
from areno_fn.kernels.sample import sample
from areno_fn.steps.token.experience import experience
from areno_fn.steps.token.paged_rollout import PagedSampler
from areno_fn.steps.token.score import act
from benchmarks import needs
from benchmarks.train_step import SHAPES


def main() -> None:
    """Measures and prints a line for each, then the ratios."""
    options = _options()
    needs.room(options.shape, "--shape")
    if options.kernels or options.tune:
        needs.gpu("the time of single kernels", "leave --kernels and --tune out")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    copy = _copy_rate(device)
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {options.shape}, {dtype}")
    print(
        f"copy {copy / 1e9:.0f} GB/s, {options.sequences} sequences, {options.prompt} + {options.new} tokens",
        flush=True,
    )
    shape = SHAPES[options.shape]
    floor = _floor_bytes(shape, options, dtype.itemsize) / copy
    drawn = options.sequences * options.new
    lines: list[dict[str, Any]] = []

    def told(line: dict[str, Any]) -> None:
        """A line is printed as soon as it is measured, so that a peer that takes too long costs no other."""
        line["tokens_per_second"] = drawn / line["seconds"]
        line["of_the_floor"] = floor / line["seconds"]
        lines.append(line)
        print(
            f"{line['name']:24s} {line['tokens_per_second']:10.0f} tokens/s  {line['seconds'] * 1e3:9.1f} "
            f"+- {line['spread'] * 1e3:.1f} ms  {line['of_the_floor']:.3f} of the floor  {line.get('notes', '')}",
            flush=True,
        )

    told({"name": "floor", "seconds": floor, "spread": 0.0})
    told(_areno(options, shape, device, dtype))
    for peer in options.peers:
        _forget(device)
        told(_transformers(options, shape, device, dtype, peer))
    for line in lines[2:]:
        print(f"areno_fn / {line['name']} {lines[1]['tokens_per_second'] / line['tokens_per_second']:.2f}")
    if options.kernels:
        lines += _kernels(copy)
    if options.tune:
        _tune()
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": name, "copy": copy, "options": vars(options), "lines": lines}, file, indent=1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--samples", type=int, default=1, help="samples a prompt; the sequences stay as many")
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", nargs="*", choices=("static", "dynamic"), default=["static"])
    parser.add_argument("--kernels", action="store_true", help="also time the kernels at the shapes they run at")
    parser.add_argument("--tune", action="store_true", help="also try other tiles of both kernels")
    parser.add_argument("--profile", action="store_true", help="also print where the time of a rollout goes")
    parser.add_argument("--json")
    return parser.parse_args()


def _areno(
    options: argparse.Namespace, shape: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    family = af.FAMILIES["qwen3"]
    config = family.config_from_hf({"model_type": "qwen3", **shape})
    policy, params = family.policy(config), family.init(config, af.Key.of(0), dtype=dtype, device=device)
    sampling = af.Sampling(max_tokens=options.new)
    count = options.sequences // options.samples
    tokens = torch.randint(0, config.vocab_size, (count, options.prompt), generator=torch.Generator().manual_seed(0))
    lengths = torch.full((count,), options.prompt)
    prompts = af.tree.map(lambda x: x.to(device), af.Prompts(tokens=tokens, lengths=lengths, ids=torch.arange(count)))
    rollout = PagedSampler(policy, (), page_size=options.page_size)
    keys = iter(range(1_000_000))

    def run() -> Any:
        return rollout(params, prompts, af.Key.of(next(keys)), sampling, samples=options.samples)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    line = {"name": "areno_fn", **_timed(run, device, options.repeats)}
    line["peak"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    drawn = run()
    assert int(drawn.lengths.sum()) == options.sequences * options.new
    apart = []
    with torch.no_grad():
        some = af.tree.map(lambda x: x[:16], drawn)
        advantages = torch.zeros(some.lengths.shape[0], device=device)
        for batch in experience(some, advantages, micro_tokens=1 << 14):
            apart.append((act(policy, sampling)(params, batch).logp - batch.old).abs())
    off = torch.cat(apart)
    line["apart_mean"], line["apart_max"] = float(off.mean()), float(off.max())
    line["notes"] = (
        f"log-probabilities differ from training's by {line['apart_mean']:.1e}, at most {line['apart_max']:.1e}"
    )
    if line["peak"]:
        line["notes"] += f"; peak {line['peak'] / 1e9:.1f} GB"
    if options.profile:
        _profile(run, device)
    return line


def _transformers(
    options: argparse.Namespace, shape: dict[str, Any], device: torch.device, dtype: torch.dtype, cache: str
) -> dict[str, Any]:
    config = transformers.Qwen3Config(**shape)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    ids = torch.randint(0, config.vocab_size, (options.sequences, options.prompt), device=device)
    how = transformers.GenerationConfig(
        max_new_tokens=options.new,
        min_new_tokens=options.new,
        do_sample=True,
        top_k=0,
        cache_implementation=cache if cache == "static" else None,
        pad_token_id=0,
    )

    def run(last: int = options.prompt + options.new) -> None:
        stop = [transformers.MaxLengthCriteria(last)] if last < options.prompt + options.new else None
        with torch.no_grad():
            drawn = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=how, stopping_criteria=stop
            )
        assert drawn.shape[1] == last

    for _ in range(2):  # compiles for the cache of the whole length
        run(min(options.prompt + 16, options.prompt + options.new))
    return {"name": f"transformers, {cache}", **_timed(run, device, max(2, options.repeats // 2), warm=0)}


def _timed(run: Callable[[], Any], device: torch.device, repeats: int, warm: int = 2) -> dict[str, float]:
    times = []
    for i in range(warm + repeats):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        if i >= warm:
            times.append(time.perf_counter() - start)
    times.sort()
    low, high = times[len(times) // 4], times[(3 * len(times)) // 4]
    return {"seconds": statistics.median(times), "spread": (high - low) / 2}


def _kernels(copy: float) -> list[dict[str, Any]]:
    """Attention and sampling at the shapes they run at, on the GPU."""
    lines, device = [], torch.device("cuda")

    def line(label: str, run: Callable[[], Any], moved: int) -> None:
        seconds = _launched(run)
        lines.append({"name": label, "seconds": seconds, "of_the_copy_rate": moved / copy / seconds})
        print(f"{label:64s} {seconds * 1e6:9.1f} us  {moved / copy / seconds:.2f} of the copy rate", flush=True)

    for case in attention_cases.HOT:
        full = Case(sizes=case.sizes, dtype=case.dtype)
        positional, keywords = attention_cases.build(full, device)
        moved = attention_cases.floor(full, positional[4]).bytes
        line(f"paged_attention {full.sizes}", lambda p=positional, k=keywords: paged_attention(*p, **k), moved)
        del positional
    for case in sample_cases.HOT:
        positional, rules = sample_cases.build(case, device)
        moved = sample_cases.floor(case).bytes
        line(f"sample {case.sizes} {case.variant}", lambda p=positional, r=rules: sample(*p, **r), moved)
    return lines


def _tune() -> None:
    """Times of both kernels at their first hot shape with other tiles, the fastest first."""
    attention, case = attention_cases.HOT[0], sample_cases.HOT[0]
    given, keywords = attention_cases.build(attention, torch.device("cuda"))
    _try(
        "paged_attention.triton",
        {"PLACES": (16, 32), "STAGES": (3, 4, 5, 6)},
        lambda: paged_attention(*given, **keywords),
    )
    drawn, rules = sample_cases.build(case, torch.device("cuda"))
    _try("sample.triton", {"BLOCKS": (4, 8, 16, 32)}, lambda: sample(*drawn, **rules))


def _try(kernel: str, choices: dict[str, tuple[int, ...]], run: Callable[[], Any]) -> None:
    module = importlib.import_module(f"areno_fn.kernels.{kernel}")
    kept = {name: getattr(module, name) for name in choices}
    times = {}
    for values in itertools.product(*choices.values()):
        for name, value in zip(choices, values, strict=True):
            setattr(module, name, value)
        times[values] = _launched(run)
    for name, value in kept.items():
        setattr(module, name, value)
    print(f"{kernel}, {', '.join(choices)}; now {tuple(kept.values())} {times[tuple(kept.values())] * 1e6:.1f} us")
    for values in sorted(times, key=times.__getitem__)[:6]:
        print(f"    {values} {times[values] * 1e6:.1f} us", flush=True)


def _launched(run: Callable[[], Any], repeats: int = 30) -> float:
    """Seconds of a call on the GPU, as a captured graph, so that the host does not count."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def _profile(run: Callable[[], Any], device: torch.device) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        run()
        _wait(device)
    by = "cuda_time_total" if device.type == "cuda" else "cpu_time_total"
    print(profile.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=60), flush=True)


def _floor_bytes(shape: dict[str, Any], options: argparse.Namespace, size: int) -> int:
    """Bytes that all token steps read: every weight once a step, and the keys and values read so far."""
    d, i, heads, kv, hd = (
        shape[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layers = shape["num_hidden_layers"]
    weights = layers * ((heads + 2 * kv) * hd * d + heads * hd * d + 3 * d * i) + shape["vocab_size"] * d
    places = sum(options.prompt + t for t in range(options.new)) * options.sequences
    return size * (options.new * weights + places * layers * 2 * kv * hd)


def _copy_rate(device: torch.device) -> float:
    """Bytes read and written a second by a copy."""
    source = torch.ones(2**29 if device.type == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _timed(lambda: target.copy_(source), device, 15)["seconds"]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    needs.run(main)
