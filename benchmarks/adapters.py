"""Time and peak memory of one step that trains adapters, against PEFT and against training all parameters; and decoding.

    python -m benchmarks.adapters [--shape qwen3-0.6b | tiny] [--rows 4] [--length 4096] [--rank 16] [--steps 5]

All train the same shape on the same tokens in bf16 (float32 on a CPU), with adapters on every linear map of the layers.
The last lines are ratios: the step against PEFT's, its memory against PEFT's, and decoding with adapters against without.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers

import areno_fn as af
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.models import adapters
from areno_fn.models.adapter_sites import chosen
from benchmarks import needs
from benchmarks.train_step import SHAPES, Case, _areno_step, _measure

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    """Measures everything and prints one line each."""
    options = _options()
    needs.room(options.shape, "--shape")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, peft {peft.__version__}, {options.shape}, rank {options.rank}, {dtype}")
    vocabulary = SHAPES[options.shape]["vocab_size"]
    tokens = torch.randint(0, vocabulary, (options.rows, options.length), generator=torch.Generator().manual_seed(0))
    everything = Case(label="plain", precision="master", shape=f"{options.rows}x{options.length}")
    seconds, peaks = {}, {}
    for label, build in (
        ("all parameters", lambda: _areno_step(everything, options.shape, tokens, device, dtype)),
        ("PEFT", lambda: _peft_step(options, tokens, device, dtype)),
        ("adapters", lambda: _adapter_step(options, tokens, device, dtype)),
    ):
        step = build()
        found = _measure(step, device, options.steps)
        seconds[label], peaks[label], loss = found["seconds"], found["peak_gb"], found["loss"]
        del step
        print(
            f"{label:15s} {tokens.numel() / seconds[label]:10.0f} tokens/s  {seconds[label] * 1e3:8.1f} ms  "
            f"peak {needs.gigabytes(peaks[label])}  loss {loss:.4f}"
        )
    plain, adapted = (_decoding(options, device, dtype, with_adapters) for with_adapters in (False, True))
    print(f"decoding        {plain:10.0f} tokens/s without adapters, {adapted:.0f} with")
    print(f"speed adapters / PEFT {seconds['PEFT'] / seconds['adapters']:.3f}")
    if device.type == "cuda":
        print(f"memory adapters / PEFT {peaks['adapters'] / peaks['PEFT']:.3f}")
    print(f"decoding with / without {adapted / plain:.3f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5, help="at least 2, of which the median is taken")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps must be at least 2, received {options.steps}")
    return options


def _model(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
    """Policy, frozen parameters, new adapters and their sites."""
    family = af.FAMILIES["qwen3"]
    config = family.config_from_hf({"model_type": "qwen3", **SHAPES[options.shape]})
    sites = chosen(family.layout(config, head_in_file=not config.tie_embeddings))
    own = adapters.init(adapters.shapes(sites, lambda _: options.rank, lambda _: 2.0), af.Key.of(1), device)
    return family.policy(config), family.init(config, af.Key.of(0), dtype=dtype, device=device), own, sites


def _adapter_step(
    options: argparse.Namespace, tokens: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> Callable[[], float]:
    policy, base, own, sites = _model(options, device, dtype)
    optimizer = af.adamw(AdamWSpec(lr=1e-4), total_steps=1000)
    objective = af.pipeline(af.score(policy, af.Sampling()), af.cross_entropy())
    update = af.train_step(
        objective, optimizer, view=lambda roles: adapters.adapt(roles["base"], roles["actor"], sites)
    )
    rows = [af.Example(tokens=tuple(row), trained=(False, *[True] * (len(row) - 1))) for row in tokens.tolist()]
    batch = (af.tree.map(lambda x: x.to(device), af.pack(rows)),)
    state = af.TrainState(
        params={"actor": own, "base": base},
        optim={"actor": optimizer.init(own)},
        snapshots={},
        counters=af.Counters(),
        key=af.Key.of(0),
        cursor=af.Cursor(),
    )

    def step() -> float:
        nonlocal state
        state, metrics = update(state, batch)
        return metrics["train/loss"]

    return step


def _peft_step(
    options: argparse.Namespace, tokens: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> Callable[[], float]:
    with device:
        config = transformers.Qwen3Config(**SHAPES[options.shape])
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    lora = peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    ids = tokens.to(device)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _decoding(options: argparse.Namespace, device: torch.device, dtype: torch.dtype, with_adapters: bool) -> float:
    """Tokens a second of a rollout of 64 sequences of 64 tokens, as a run draws them."""
    policy, base, own, sites = _model(options, device, dtype)
    params = adapters.adapt(base, own, sites) if with_adapters else base
    prompts = af.Prompts(
        tokens=torch.arange(64 * 16, device=device).reshape(64, 16) % policy.vocab_size,
        lengths=torch.full((64,), 16, device=device),
        ids=torch.arange(64, device=device),
    )
    rollout = af.sampler(policy, ())
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        drawn = rollout(params, prompts, af.Key.of(2), af.Sampling(max_tokens=64))
        total = int(drawn.lengths.sum())  # waits for the device
        seconds.append(time.perf_counter() - start)
    return total / min(seconds)


if __name__ == "__main__":
    needs.run(main)
