"""Time and peak memory of one SFT step, against transformers with torch.optim.AdamW in the same process.

    python -m benchmarks.train_step [--shape qwen3-0.6b | tiny] [--batches 4x4096 16x1024] [--json step.json]
        [--peers eager compile@16x1024 liger liger-checkpointing liger-compile]

All train the same shape on the same tokens in bf16 (float32 on a CPU). Peers keep parameters and moments of
`torch.optim.AdamW(fused=True)` in bf16; this library keeps float32 master weights and moments, as its optimizer always
does. `areno_fn remat` computes every layer again in the backward pass. A step ends when its loss is on the host. A peer
may be asked for on one batch alone.

Times are medians of steps with half the distance between the quartiles. The matmul rate is measured in the same run. The peers with
Liger's kernels need the package liger-kernel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
import transformers

import areno_fn as af
from areno_fn.contracts.spec import AdamWSpec

SHAPES = {
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
PEERS = ("eager", "compile", "liger", "liger-checkpointing", "liger-compile")

Step = Callable[[], float]


def main() -> None:
    """Measures all on every batch, prints a line for each and the ratio to the fastest peer."""
    options = _options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {options.shape}, {dtype}")
    rate = _matmul_rate(device, dtype)
    print(f"matmul rate {rate / 1e12:.1f} TFLOP/s", flush=True)
    lines: list[dict[str, Any]] = []
    # Liger replaces functions of transformers for good, so its peers come last
    for label in ("areno_fn", "areno_fn remat", *PEERS):
        for batch in options.batches:
            if label in PEERS and not {label, f"{label}@{batch}"} & set(options.peers):
                continue
            rows, length = (int(part) for part in batch.split("x"))
            lines.append({"label": label, "batch": batch} | _line(label, options, rows, length, device, dtype, rate))
    for batch in options.batches:
        _ratios([line for line in lines if line["batch"] == batch])
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": name, "matmul_rate": rate, "lines": lines}, file, indent=1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--batches", nargs="+", default=["4x256"], help="rows x length")
    parser.add_argument("--peers", nargs="*", default=["eager"], help=f"of {', '.join(PEERS)}, or one as name@batch")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", help="also write the figures to this file")
    return parser.parse_args()


def _line(
    label: str,
    options: argparse.Namespace,
    rows: int,
    length: int,
    device: torch.device,
    dtype: torch.dtype,
    rate: float,
) -> dict[str, Any]:
    """Measures one, prints what was found, and returns it."""
    shape = SHAPES[options.shape]
    tokens = torch.randint(0, shape["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(0))
    begin = time.perf_counter()
    if label.startswith("areno_fn"):
        step = _areno_step(options.shape, tokens, device, dtype, remat=label.endswith("remat"))
    else:
        step = _transformers_step(options.shape, tokens, device, dtype, label)
    found = _measure(step, device, options.steps)
    del step
    _forget(device)
    found["tokens_per_s"] = tokens.numel() / found["seconds"]
    found["of_matmul_rate"] = _flops(shape, rows, length) / found["seconds"] / rate
    found["whole_s"] = time.perf_counter() - begin
    print(
        f"{label:20s} {rows:3d} x {length:5d} {found['tokens_per_s']:9.0f} tokens/s  {found['seconds'] * 1e3:7.1f} ms "
        f"(+- {found['spread'] * 1e3:.1f})  peak {found['peak_gb']:6.2f} GB  {found['of_matmul_rate']:.3f} of the matmul "
        f"rate  loss {found['loss']:.4f}",
        flush=True,
    )
    return found


def _ratios(lines: list[dict[str, Any]]) -> None:
    peers = [line for line in lines if not line["label"].startswith("areno_fn")]
    if peers:
        best = max(peers, key=lambda line: line["tokens_per_s"])
        for line in lines:
            if line["label"].startswith("areno_fn"):
                ratio = line["tokens_per_s"] / best["tokens_per_s"]
                print(f"{line['batch']}: {line['label']} {ratio:.3f} of the tokens/s of {best['label']}")


def _areno_step(
    shape: str, tokens: torch.Tensor, device: torch.device, dtype: torch.dtype, *, remat: bool = False
) -> Step:
    family = af.FAMILIES["qwen3"]
    config = family.config_from_hf({"model_type": "qwen3", **SHAPES[shape]})
    params = family.init(config, af.Key.of(0), dtype=dtype, device=device)
    optimizer = af.adamw(AdamWSpec(lr=1e-5), total_steps=1000)
    policy = attrs.evolve(family.policy(config), remat=remat)
    objective = af.pipeline(af.score(policy, af.Sampling()), af.cross_entropy())
    update = af.train_step(objective, optimizer)
    rows = [af.Example(tokens=tuple(row), trained=(False, *[True] * (len(row) - 1))) for row in tokens.tolist()]
    batch = (af.tree.map(lambda x: x.to(device), af.pack(rows)),)
    state = af.TrainState(
        params={"actor": params},
        optim={"actor": optimizer.init(params)},
        snapshots={},
        counters=af.Counters(),
        key=af.Key.of(0),
        cursor=af.Cursor(),
    )
    del params

    def step() -> float:
        nonlocal state
        state, metrics = update(state, batch)
        return metrics["train/loss"]

    return step


def _transformers_step(shape: str, tokens: torch.Tensor, device: torch.device, dtype: torch.dtype, kind: str) -> Step:
    if kind.startswith("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3()
    config = transformers.Qwen3Config(**SHAPES[shape])
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if kind.endswith("checkpointing"):
        model.gradient_checkpointing_enable()
        model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    ids = tokens.to(device)
    run = torch.compile(model) if kind.endswith("compile") else model

    def step() -> float:
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _measure(step: Step, device: torch.device, steps: int) -> dict[str, Any]:
    for _ in range(3):
        loss = step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    marks = [time.perf_counter()]
    for _ in range(steps):
        loss = step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else float("nan")
    low, middle, high = statistics.quantiles([b - a for a, b in itertools.pairwise(marks)], n=4)
    return {"seconds": middle, "spread": (high - low) / 2, "peak_gb": peak, "loss": loss}


def _forget(device: torch.device) -> None:
    """Graphs and memory of what was measured."""
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if device.type == "cuda" else 512
    source = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, dtype=dtype, generator=source) for _ in "ab")
    for _ in range(3):
        a @ b
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        a @ b
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 10 * 2 * size**3 / (time.perf_counter() - start)


def _flops(shape: dict[str, int], rows: int, length: int) -> float:
    """Forward and backward: 6 per weight and token, and causal attention's two products."""
    d, i, heads, kv, hd = (
        shape[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    weights = (
        shape["num_hidden_layers"] * ((heads + 2 * kv) * hd * d + heads * hd * d + 3 * d * i) + shape["vocab_size"] * d
    )
    attention = shape["num_hidden_layers"] * 6 * heads * hd * length
    return float(rows * length * (6 * weights + attention))


if __name__ == "__main__":
    main()
