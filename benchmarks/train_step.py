"""Time and peak memory of one SFT step, against transformers with torch.optim.AdamW in the same process.

    python -m benchmarks.train_step [--model qwen3-0.6b | tiny] [--shapes 4x4096 16x1024] [--precisions stored master]
        [--ours plain captured every:2 full] [--peers eager compile liger liger-compile liger-checkpointing]
        [--cases liger/master/4x4096 ...] [--steps 8] [--seconds 140] [--json step.json]

All train one model on the same tokens. With the precision `stored` parameters and moments are in bfloat16 and there are no
masters, as `torch.optim.AdamW(fused=True)` keeps them for a model in bfloat16. With `master` parameters are moved in float32
with moments in float32, and products are taken in bfloat16: peers hold float32 parameters and run under autocast, this
library derives bfloat16 parameters from masters. On a CPU everything is float32.

Of this library, `plain` keeps what every layer makes, `full` computes every layer again in the backward pass and `every:k`
every k-th one; `captured` is `plain` as one CUDA graph. All donate their state. A step ends when its loss is on the host.
Peers whose name ends in `compile` are compiled whole, those in `compile-layers` layer by layer, with their loss, which takes a
fraction of the time to compile. `--cases` names lines one by one, in the place of all combinations.

Times are medians of steps with half the distance between the quartiles. The matmul rate is measured in the same run. What is not
begun within `--seconds` is printed as not run. The peers with Liger's kernels need the package liger-kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
import transformers

import areno_fn as af
from areno_fn.contracts.footprint import Footprint
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.engine.predict import predict
from benchmarks import needs

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
PEERS = (
    "eager", "compile", "compile-layers", "liger", "liger-checkpointing", "liger-compile", "liger-compile-layers",
)  # fmt: skip
PRECISIONS = ("stored", "master")
OWN = re.compile(r"plain|captured|full|every:[1-9]\d*")
SIZES = re.compile(r"[1-9]\d*x[1-9]\d*")

Step = Callable[[], float]


@attrs.frozen
class Case:
    """One line of the table: who makes the step, at which precision, on rows x length tokens."""

    label: str
    precision: str
    shape: str

    @property
    def is_own(self) -> bool:
        """Whether it is this library's."""
        return self.label not in PEERS

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and length."""
        rows, length = (int(part) for part in self.shape.split("x"))
        return rows, length


def main() -> None:
    """Measures all, prints a line for each and the ratio to the fastest peer."""
    options = _options()
    cases = _cases(options)
    _require(options, cases)
    begin = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {options.model}, {dtype}")
    rate = _matmul_rate(device, dtype)
    print(f"matmul rate {needs.tflops(rate)}", flush=True)
    lines: list[dict[str, Any]] = []
    for case in cases:
        if options.seconds and time.perf_counter() - begin > options.seconds:
            print(f"{case.label} {case.precision} {case.shape}: not run, {options.seconds} s are over")
            continue
        print(f"  {case.label} {case.precision} {case.shape} begins at {time.perf_counter() - begin:.0f} s", flush=True)
        lines.append(attrs.asdict(case) | {"is_own": case.is_own} | _line(case, options, device, dtype, rate))
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"device": name, "matmul_rate": rate, "lines": lines}, file, indent=1)
    for precision, shape in dict.fromkeys((line["precision"], line["shape"]) for line in lines):
        _ratios([line for line in lines if (line["precision"], line["shape"]) == (precision, shape)])


def _cases(options: argparse.Namespace) -> list[Case]:
    """What is measured, in order. Liger replaces functions of transformers for good, so its peers come last."""
    labels = [*options.ours, *(peer for peer in PEERS if peer in options.peers)]
    named = [case.split("/") for case in options.cases] or itertools.product(labels, options.precisions, options.shapes)
    cases = [_case("/".join(of)) for of in named]
    return [case for liger in (False, True) for case in cases if case.label.startswith("liger") == liger]


def _case(text: str) -> Case:
    """Reads label/precision/shape.

    Raises:
        NeedsError: it is none.
    """
    label, precision, shape = (*text.split("/"), "", "", "")[:3]
    own = all(OWN.fullmatch(option) for option in label.split("+"))
    if text.count("/") != 2 or not (own or label in PEERS) or precision not in PRECISIONS or not SIZES.fullmatch(shape):
        raise needs.NeedsError(
            f"{text!r} is no case; it is label/precision/shape, the label one of {', '.join(PEERS)} or of plain, captured, "
            f"full and every:k joined by +, the precision {' or '.join(PRECISIONS)}, the shape rows x length such as 4x256"
        )
    return Case(label, precision, shape)


def _require(options: argparse.Namespace, cases: list[Case]) -> None:
    """Everything that some case needs and this machine may lack."""
    needs.room(options.model, "--model")
    if any("captured" in case.label.split("+") for case in cases):
        needs.gpu("a captured step, which is a CUDA graph,", "leave captured out")
    if any(case.label.startswith("liger") for case in cases):
        needs.package("liger_kernel", "a peer with Liger's kernels", "liger-kernel")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--shapes", nargs="+", default=["4x256"], help="rows x length")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["stored"])
    parser.add_argument(
        "--ours", nargs="*", default=["plain"], help="of plain, captured, full, every:k, and more with +"
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["eager"])
    parser.add_argument("--cases", nargs="*", default=[], help="label/precision/shape, instead of all combinations")
    parser.add_argument("--steps", type=int, default=8, help="at least 2, of which the median is taken")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin nothing after so long; 0: no end")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps must be at least 2, received {options.steps}")
    return options


def _line(
    case: Case, options: argparse.Namespace, device: torch.device, dtype: torch.dtype, rate: float
) -> dict[str, Any]:
    """Measures one, prints what was found, and returns it."""
    model = SHAPES[options.model]
    tokens = torch.randint(0, model["vocab_size"], case.sizes, generator=torch.Generator().manual_seed(0))
    begin = time.perf_counter()
    make = _areno_step if case.is_own else _transformers_step
    step = make(case, options.model, tokens, device, dtype)
    found = _measure(step, device, options.steps)
    del step
    _forget(device)
    found["tokens_per_s"] = tokens.numel() / found["seconds"]
    found["of_matmul_rate"] = _flops(model, *case.sizes) / found["seconds"] / rate
    found["whole_s"] = time.perf_counter() - begin
    expected = _expected(case, options.model, tokens) if case.is_own and device.type == "cuda" else None
    found["predicted_gb"] = None if expected is None else expected.total / 1e9
    print(
        f"{case.label:20s} {case.precision:6s} {case.shape:>7s} {found['tokens_per_s']:9.0f} tokens/s  "
        f"{found['seconds'] * 1e3:7.1f} ms (+- {found['spread'] * 1e3:.1f})  "
        f"peak {needs.gigabytes(found['peak_gb'])}, reserved {needs.gigabytes(found['reserved_gb'])}  "
        f"{found['of_matmul_rate']:.3f} of the matmul rate  loss {found['loss']:.4f}",
        flush=True,
    )
    if expected is not None:
        share = found["peak_gb"] / found["predicted_gb"]
        print(f"{'':20s} measured {share:.3f} of the predicted {expected}", flush=True)
    return found


def _ratios(lines: list[dict[str, Any]]) -> None:
    peers = [line for line in lines if not line["is_own"] and not line["label"].endswith("checkpointing")]
    if peers:
        best = max(peers, key=lambda line: line["tokens_per_s"])
        for line in lines:
            if line["is_own"]:
                ratio = line["tokens_per_s"] / best["tokens_per_s"]
                print(
                    f"{line['shape']} {line['precision']}: {line['label']} {ratio:.3f} of the tokens/s of {best['label']}"
                )


def _areno_step(case: Case, model: str, tokens: torch.Tensor, device: torch.device, dtype: torch.dtype) -> Step:
    family = af.FAMILIES["qwen3"]
    config = family.config_from_hf({"model_type": "qwen3", **SHAPES[model]})
    params = family.init(config, af.Key.of(0), dtype=dtype, device=device)
    optimizer = af.adamw(_optimizer(case), total_steps=1000)
    options = case.label.split("+")
    policy = attrs.evolve(family.policy(config), remat=_remat(options))
    objective = af.pipeline(af.score(policy, af.Sampling()), af.cross_entropy())
    update = af.train_step(objective, optimizer, donate=True, capture="captured" in options)
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


def _expected(case: Case, model: str, tokens: torch.Tensor) -> Footprint:
    """The memory that a step on a GPU should need; a graph has it set aside."""
    config = af.FAMILIES["qwen3"].config_from_hf({"model_type": "qwen3", **SHAPES[model]})
    decisions, remat = tokens.numel() - tokens.shape[0], _remat(case.label.split("+"))
    return predict(config, _optimizer(case), tokens.numel(), decisions=decisions, remat=remat)


def _optimizer(case: Case) -> AdamWSpec:
    return AdamWSpec(lr=1e-5, states="stored" if case.precision == "stored" else "float32")


def _remat(options: list[str]) -> int:
    """Every which layer is computed again."""
    named = {"full": 1} | {option: int(option.partition(":")[2]) for option in options if option.startswith("every:")}
    return next((every for option, every in named.items() if option in options), 0)


def _transformers_step(case: Case, model: str, tokens: torch.Tensor, device: torch.device, dtype: torch.dtype) -> Step:
    if case.label.startswith("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3()
    config = transformers.Qwen3Config(**SHAPES[model])
    masters = case.precision == "master"
    with device:
        net = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32 if masters else dtype)
    if case.label.endswith("checkpointing"):
        net.gradient_checkpointing_enable()
        net.train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=device.type == "cuda")
    ids = tokens.to(device)
    run = torch.compile(net) if case.label.endswith("compile") else net
    if case.label.endswith("compile-layers"):
        for layer in net.model.layers:
            layer.compile()
        if not case.label.startswith("liger"):
            net.loss_function = torch.compile(net.loss_function)
    cast = torch.autocast("cuda", torch.bfloat16) if masters and device.type == "cuda" else contextlib.nullcontext()

    def step() -> float:
        with cast:
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
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
    reserved = torch.cuda.max_memory_reserved() / 1e9 if device.type == "cuda" else None
    marks = [time.perf_counter()]
    for _ in range(steps):
        loss = step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
    low, middle, high = statistics.quantiles([b - a for a, b in itertools.pairwise(marks)], n=4)
    return {"seconds": middle, "spread": (high - low) / 2, "peak_gb": peak, "reserved_gb": reserved, "loss": loss}


def _forget(device: torch.device) -> None:
    """Graphs and memory of what was measured."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


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
    needs.run(main)
