"""Time and peak memory of one SFT step, against transformers with torch.optim.AdamW in the same process.

    python benchmarks/train_step.py [--shape qwen3-0.6b | tiny] [--rows 4] [--length 4096] [--steps 5]

Both train the same shape on the same number of tokens in bf16 (float32 on a CPU). The peer keeps parameters and
AdamW moments in bf16; this library keeps float32 master weights and moments, as its optimizer always does. The
matmul rate is measured in the same run, so that the fraction of it can be given. The last line is the ratio.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

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


def main() -> None:
    """Measures both and prints one line each."""
    options = _options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {options.shape}, {dtype}")
    rate = _matmul_rate(device, dtype)
    print(f"matmul rate {rate / 1e12:.1f} TFLOP/s")
    tokens = torch.randint(
        0,
        SHAPES[options.shape]["vocab_size"],
        (options.rows, options.length),
        generator=torch.Generator().manual_seed(0),
    )
    flops = _flops(SHAPES[options.shape], options.rows, options.length)
    results = {}
    for label, build in (("transformers", _transformers_step), ("areno_fn", _areno_step)):
        step = build(options.shape, tokens, device, dtype)
        seconds, peak, loss = _measure(step, device, options.steps)
        del step
        results[label] = tokens.numel() / seconds
        print(
            f"{label:13s} {tokens.numel() / seconds:10.0f} tokens/s  {seconds * 1e3:8.1f} ms  peak {peak / 1e9:6.2f} GB  "
            f"{flops / seconds / rate:.3f} of the matmul rate  loss {loss:.4f}"
        )
    print(f"ratio areno_fn / transformers {results['areno_fn'] / results['transformers']:.3f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    return parser.parse_args()


def _areno_step(shape: str, tokens: torch.Tensor, device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
    family = af.FAMILIES["qwen3"]
    config = family.config_from_hf({"model_type": "qwen3", **SHAPES[shape]})
    params = family.init(config, af.Key.of(0), dtype=dtype, device=device)
    optimizer = af.adamw(AdamWSpec(lr=1e-5), total_steps=1000)
    objective = af.pipeline(af.score(family.policy(config), af.Sampling()), af.cross_entropy())
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


def _transformers_step(
    shape: str, tokens: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> Callable[[], float]:
    config = transformers.Qwen3Config(**SHAPES[shape])
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = tokens.to(device)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _measure(step: Callable[[], float], device: torch.device, steps: int) -> tuple[float, float, float]:
    for _ in range(2):
        loss = step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(steps):
        loss = step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else float("nan")
    return (time.perf_counter() - start) / steps, peak, loss


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if device.type == "cuda" else 512
    a, b = (
        torch.ones(size, size, device=device, dtype=dtype) * 0.5 + torch.eye(size, device=device, dtype=dtype)
        for _ in "ab"
    )
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
