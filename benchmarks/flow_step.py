"""Flow-GRPO on SD3.5: time and peak memory of sampling and of an update, against diffusers, PEFT and autograd.

    python -m benchmarks.flow_step [--shape sd3.5-medium | tiny] [--pixels 512] [--rows 16] [--micro 8] [--steps 10]
                                   [--rank 32] [--repeats 3] [--sides plain compiled eager] [--json flow.json]

Both sides draw `rows` latents with noise in every step but the last and guidance 4.5, asking the model for both conditions in one
batch, then make one update of adapters on every noisy step, in micro-batches of `micro` rows. Weights are random and bf16
(float32 on a CPU), adapters float32. "plain" is the step as a user would write it, in `benchmarks/flow_peer.py`; "eager" and
"compiled" are this library's, whose blocks are compiled in the second. Times are medians with half the distance between the
quartiles. The matmul rate is measured in the same run; products are counted by torch's flop counter, once forward in
sampling and twice in an update, whose frozen weights need no gradient.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch.utils.flop_counter import FlopCounterMode

import areno_fn as af
from areno_fn.contracts.flow import Conditions, FlowPrompts, Process
from areno_fn.contracts.flow_adapter import Pipeline, Setting
from areno_fn.contracts.geometry import Size
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.models import adapters
from areno_fn.models.adapter_sites import chosen
from areno_fn.models.flow_layouts import FLOW_LAYOUTS
from areno_fn.models.sd3 import adapter as sd3
from areno_fn.steps.flow.noise import noise_levels
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.schedule import flow_match
from areno_fn.steps.flow.score import act_flow, denoising
from benchmarks import needs
from benchmarks.flow_peer import SHAPES, TARGETS, Plain, Task
from benchmarks.train_step import _matmul_rate

GUIDANCE = 4.5
LEVEL = 0.7
SHIFT = 3.0


def main() -> None:
    """Measures every side and prints a line for each phase, then the ratios."""
    options = _options()
    needs.room(options.shape, "--shape")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, diffusers {diffusers.__version__}, {options.shape}, {options.pixels} px, {dtype}"
    )
    task, rate = _task(options, device, dtype), _matmul_rate(device, dtype)
    products = _products(options, task)
    print(
        f"{options.rows} rows, {options.steps} steps, {products / 1e12:.3g} TFLOP a row and step, matmul {needs.tflops(rate)}"
    )
    sides = {"plain": _plain, "eager": _eager, "compiled": _compiled}
    lines = []
    for side in options.sides:
        sample, update = sides[side](options, task, device, dtype)
        for phase, run, count in (("sample", sample, options.steps), ("update", update, 2 * (options.steps - 1))):
            line = {"side": side, "phase": phase, **_timed(run, device, options.repeats)}
            line["of_matmul_rate"] = products * options.rows * count / line["seconds"] / rate
            lines.append(line)
            print(
                f"{side:9s} {phase}  {line['seconds'] * 1e3:9.1f} ms (+- {line['spread'] * 1e3:.1f})  "
                f"peak {needs.gigabytes(line['peak_gb'])}  {line['of_matmul_rate']:.3f} of the matmul rate  "
                f"first {line['first']:.1f} s",
                flush=True,
            )
        del sample, update
        _forget(device)
    _ratios(lines)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": name, "options": vars(options), "matmul": rate, "lines": lines}, file, indent=1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--text", type=int, default=333, help="tokens of text: 77 of CLIP and 256 of T5")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--sides", nargs="+", choices=("plain", "eager", "compiled"), default=["plain", "eager", "compiled"]
    )
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if options.pixels < 16 or options.pixels % 16:
        parser.error(f"--pixels must be a multiple of 16, received {options.pixels}")
    if options.micro < 1 or options.rows % options.micro:
        parser.error(f"--rows must be a multiple of --micro, received {options.rows} and {options.micro}")
    return options


def _task(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Task:
    shape, side = SHAPES[options.shape], options.pixels // 8
    source = torch.Generator().manual_seed(0)

    def text() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randn(options.rows, options.text, shape["joint_attention_dim"], generator=source)
        pooled = torch.randn(options.rows, shape["pooled_projection_dim"], generator=source)
        return tokens.to(device, dtype), pooled.to(device, dtype)

    sigmas = flow_match(options.steps, shift=SHIFT).sigmas.to(device)
    latent = (shape["in_channels"], side, side)
    positive, negative = text(), text()
    return Task(
        positive=positive, negative=negative, sigmas=sigmas, level=LEVEL, guidance=GUIDANCE, micro=options.micro, latent=latent
    )  # fmt: skip


Runs = tuple[Callable[[], Any], Callable[[], Any]]


def _plain(options: argparse.Namespace, task: Task, device: torch.device, dtype: torch.dtype) -> Runs:
    torch.manual_seed(0)
    side = Plain(SHAPES[options.shape], options.rank, device, dtype)
    states = side.sample(task)
    old, advantage = side.recorded(task, states), _advantage(task, device)
    return lambda: side.sample(task), lambda: side.train(task, states, old, advantage)


def _eager(options: argparse.Namespace, task: Task, device: torch.device, dtype: torch.dtype) -> Runs:
    return _ours(options, task, device, dtype, compiled=False)


def _compiled(options: argparse.Namespace, task: Task, device: torch.device, dtype: torch.dtype) -> Runs:
    return _ours(options, task, device, dtype, compiled=True)


def _ours(options: argparse.Namespace, task: Task, device: torch.device, dtype: torch.dtype, *, compiled: bool) -> Runs:
    shape = SHAPES[options.shape]
    family = FLOW_LAYOUTS["sd3"]
    sites = chosen(family.layout(family.config_from_hf({"_class_name": family.name, **shape})), TARGETS)
    torch.manual_seed(0)
    with device:
        made = diffusers.SD3Transformer2DModel(**shape).to(dtype)
    base = {name: value.detach() for name, value in made.state_dict().items()}
    del made
    setting = Setting(size=Size(height=options.pixels, width=options.pixels), compiled=compiled)
    policy = sd3.adapter(_pipeline(shape), setting)
    own = adapters.init(adapters.shapes(sites, lambda _: options.rank, lambda _: 2.0), af.Key.of(1), device)
    optimizer = af.adamw(AdamWSpec(lr=1e-4, max_grad_norm=0.0), total_steps=1000)
    state = af.TrainState(
        params={"actor": own, "base": base},
        optim={"actor": optimizer.init(own)},
        snapshots={},
        counters=af.Counters(),
        key=af.Key.of(0),
        cursor=af.Cursor(),
    )

    def view(roles: Any) -> Any:
        return adapters.adapt(roles["base"], roles["actor"], sites, dtype=dtype)

    update = af.train_step(af.pipeline(act_flow(policy), af.clipped(1e-4, 1e-4)), optimizer, view=view)
    rollout = flow_sampler(policy, Process(dynamics="flow_sde", guidance=GUIDANCE))
    said = [{"text": text, "pooled": pooled} for text, pooled in (task.positive, task.negative)]
    conditions = Conditions(positive=said[0], negative=said[1])
    prompts = FlowPrompts(conditions=conditions, ids=torch.arange(task.rows, device=device))
    schedule = af.tree.map(lambda x: x.to(device), flow_match(options.steps, shift=SHIFT))
    levels = noise_levels(options.steps, None, LEVEL).to(device)
    keys = iter(range(1_000_000))

    def sample() -> Any:
        return rollout(view(state.params), prompts, af.Key.of(next(keys)), schedule, levels)

    drawn, advantage = sample(), _advantage(task, device)

    def train() -> float:
        nonlocal state
        state, metrics = update(state, denoising(drawn, advantage, micro=task.micro))
        return float(metrics["train/loss"])

    return sample, train


def _pipeline(shape: dict[str, Any]) -> Pipeline:
    configs = {
        "transformer": {"_class_name": "SD3Transformer2DModel", **shape},
        "vae": {"block_out_channels": [128, 256, 512, 512]},
        "scheduler": {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": SHIFT},
    }
    return Pipeline(class_name="StableDiffusion3Pipeline", index={}, options={}, configs=configs)


def _advantage(task: Task, device: torch.device) -> torch.Tensor:
    return torch.linspace(-1, 1, task.rows, device=device)


def _products(options: argparse.Namespace, task: Task) -> float:
    """Floating-point operations of the model's products for one row under both conditions."""
    shape = SHAPES[options.shape]
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        diffusers.SD3Transformer2DModel(**shape)(
            hidden_states=torch.empty(2, *task.latent),
            timestep=torch.empty(2),
            encoder_hidden_states=torch.empty(2, options.text, shape["joint_attention_dim"]),
            pooled_projections=torch.empty(2, shape["pooled_projection_dim"]),
        )
    return float(counter.get_total_flops())


def _timed(run: Callable[[], Any], device: torch.device, repeats: int) -> dict[str, float]:
    begin = time.perf_counter()
    run()
    _wait(device)
    first = time.perf_counter() - begin
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - begin)
    low, middle, high = statistics.quantiles(times, n=4) if repeats > 1 else (times[0],) * 3
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
    return {"seconds": middle, "spread": (high - low) / 2, "peak_gb": peak, "first": first}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _forget(device: torch.device) -> None:
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _ratios(lines: list[dict[str, Any]]) -> None:
    plain = {line["phase"]: line for line in lines if line["side"] == "plain"}
    for line in lines:
        if line["side"] != "plain" and plain:
            there = plain[line["phase"]]
            memory = "" if line["peak_gb"] is None else f", {line['peak_gb'] / there['peak_gb']:.3f} of its memory"
            speed = there["seconds"] / line["seconds"]
            print(f"{line['side']} {line['phase']}: {speed:.3f} of the speed of plain{memory}")


if __name__ == "__main__":
    needs.run(main)
