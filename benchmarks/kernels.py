"""Time of every kernel at the shapes that training runs at, against what the hardware allows and against torch.

    python -m benchmarks.kernels [--json kernels.json] [--only rms_norm token_logp]
    python -m benchmarks.kernels --record kernels.json       writes areno_fn/kernels/measured.py

The floor of a case is the larger of its bytes over the copy rate and its operations over the matmul rate, both
measured in the same process. Every time is the median of repeats, each over inputs that do not fit into the cache, with the
spread between the first and the third quartile. Forward and backward are timed together.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from areno_fn.kernels.attention import equal_documents, packed_attention, packed_layout
from areno_fn.kernels.law import Case, Cases, cotangents_of
from areno_fn.kernels.symmetric_product import symmetric_product

KERNELS = (
    "rms_norm",
    "add_rms_norm",
    "gated_silu",
    "gated_gelu",
    "rotary",
    "norm_rotary",
    "token_logp",
    "linear_token_logp",
    "linear_token_loss",
)
PARTS = (*KERNELS, "attention", "symmetric_product")
LARGE = Case(sizes=(16384, 1024, 151936), dtype=torch.bfloat16, variant="plain", magnitude=3.0)
"""What the head of a 0.6 B model has to do for 16,384 tokens."""


def main() -> None:
    """Measures and prints a line for each case, then everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument(
        "--record", help="measure nothing, and make what python -m areno_fn.kernels prints of such a file"
    )
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    if options.record:
        with open(options.record) as file:
            record(json.load(file))
        return
    rates = {"copy": copy_rate(), "matmul": matmul_rate()}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"copy {rates['copy'] / 1e9:.0f} GB/s, matmul {rates['matmul'] / 1e12:.0f} TFLOP/s", flush=True)
    lines = []
    for name in options.only:
        if name == "attention":
            lines += [*attention_lines(), *bent_lines()]
        else:
            lines += symmetric_lines() if name == "symmetric_product" else kernel_lines(name, rates)
        if options.json:
            with open(options.json, "w") as file:
                device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
                json.dump({"device": device, "rates": rates, "lines": lines}, file, indent=1)


def record(found: dict[str, Any]) -> None:
    """Writes the module that holds the last figures."""
    copy, matmul = found["rates"]["copy"] / 1e9, found["rates"]["matmul"] / 1e12
    lines = [f"    ({label!r}, {line!r})," for label, line in map(_sentence, found["lines"])]
    device = f"{found['device']}, copy {copy:.0f} GB/s, matmul {matmul:.0f} TFLOP/s"
    text = f'''"""The last figures of `benchmarks/kernels.py`; written by it."""

from __future__ import annotations

DEVICE = {json.dumps(device)}

MEASURED = (
{chr(10).join(lines)}
)
"""Labels and lines."""
'''
    with open("areno_fn/kernels/measured.py", "w") as file:
        file.write(text.replace("'", '"'))


def _sentence(line: dict[str, Any]) -> tuple[str, str]:
    label = " ".join(line["label"].split())
    part = f"{line['of_floor']:.2f} of the floor" if "of_floor" in line else f"{line['tflops']:.0f} TFLOP/s"
    case = label.partition(" ")[2]
    return label, f"{case}: {line['ms']:.3f} ms, {part}, {line['peak_gb']:.2f} GB"


def kernel_lines(name: str, rates: dict[str, float]) -> list[dict[str, Any]]:
    """Every hot case of a kernel."""
    cases: Cases = importlib.import_module(f"areno_fn.kernels.{name}.cases").CASES
    extra = (LARGE,) if "linear" in name else ()
    lines = []
    for case in (*cases.hot, *extra):
        arguments = cases.build(case, "cuda")
        cotangents = cotangents_of(cases, case, arguments)
        given = list(arguments.positional)
        for i in arguments.moving:
            given[i] = given[i].detach().requires_grad_()

        def run(
            given: Any = given, cases: Cases = cases, cotangents: Any = cotangents, arguments: Any = arguments
        ) -> None:
            result = cases.function(*given, **arguments.keywords)
            result = result if isinstance(result, tuple) else (result,)
            torch.autograd.grad([result[i] for i in cases.answered], [given[i] for i in arguments.moving], cotangents)

        floors = (cases.forward_floor(case), cases.backward_floor(case))
        floor = sum(
            max(f.bytes / rates["copy"], (f.flops if "linear" in name else 0) / rates["matmul"]) for f in floors
        )
        label = f"{name} {'x'.join(map(str, case.sizes))} {case.variant}".strip()
        lines.append(line(label, run, floor=floor))
        del given, run, cotangents, arguments
        torch.cuda.empty_cache()
    return lines


def attention_lines() -> list[dict[str, Any]]:
    """Forward and backward of packed documents of 16 query and 8 key heads of 128, against torch's own backends."""
    lines = []
    ragged = [4096, 3000, 2500, 2100, 1700, 1200, 900, 500, 250, 138]
    for label, lengths in (("4 x 4096", [4096] * 4), ("16 x 1024", [1024] * 16), ("ragged, 16384 in all", ragged)):
        count = sum(lengths)
        case = Case(sizes=(count,), dtype=torch.bfloat16)
        q, k, v, dout = (
            case.normal(name, count, heads, 128, device="cuda").requires_grad_()
            for name, heads in (("q", 16), ("k", 8), ("v", 8), ("o", 16))
        )
        even = len(set(lengths)) == 1
        segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
        layout = (
            equal_documents(len(lengths), lengths[0]) if even else packed_layout(segments, (len(lengths), max(lengths)))
        )
        flops = sum(7 * 16 * 128 * n * n for n in lengths)

        def ours(q: Any = q, k: Any = k, v: Any = v, dout: Any = dout, layout: Any = layout) -> None:
            torch.autograd.grad(packed_attention(q, k, v, layout, 128**-0.5), (q, k, v), dout)

        def padded(q: Any = q, k: Any = k, v: Any = v, dout: Any = dout, layout: Any = layout) -> None:
            sides = (layout.pad(x).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(*sides, is_causal=True, enable_gqa=True)
            torch.autograd.grad(layout.unpad(out.transpose(1, 2)), (q, k, v), dout)

        lines.append(line(f"attention {label}", ours, flops=flops))
        lines.append(line(f"  torch's default, {'a view' if even else 'padded'}", padded, flops=flops))
    return lines


def bent_lines() -> list[dict[str, Any]]:
    """Forward and backward with windows and soft caps; only pairs that are seen count."""
    cases: Cases = importlib.import_module("areno_fn.kernels.attention.cases").CASES
    lines = []
    for case in cases.hot:
        arguments = cases.build(case, "cuda")
        (dout,) = cotangents_of(cases, case, arguments)
        q, k, v, *rest = arguments.positional
        sides = tuple(x.requires_grad_() for x in (q, k, v))

        def run(sides: Any = sides, rest: Any = rest, dout: Any = dout, keywords: Any = arguments.keywords) -> None:
            torch.autograd.grad(packed_attention(*sides, *rest, **keywords), sides, dout)

        flops = cases.forward_floor(case).flops + cases.backward_floor(case).flops
        label = f"attention {'x'.join(map(str, case.sizes))} {case.variant}".strip()
        lines.append(line(label, run, flops=flops))
    return lines


def symmetric_lines() -> list[dict[str, Any]]:
    """A product of a matrix and its transpose against all of it by cuBLAS; operations are those of all of it."""
    cases: Any = importlib.import_module("areno_fn.kernels.symmetric_product.cases")
    lines = []
    for case in cases.HOT:
        (a, *c), keywords = cases.build(case, "cuda")
        count, size, width = case.sizes
        label = f"symmetric_product {'x'.join(map(str, case.sizes))} {case.variant}"
        flops = 2 * count * size * size * width
        lines.append(line(label, lambda a=a, c=c, k=keywords: symmetric_product(a, *c, **k), flops=flops))

        def whole(a: Any = a, c: Any = c, keywords: Any = keywords) -> None:
            if c:
                torch.baddbmm(c[0], a, a.mT, alpha=keywords["alpha"], beta=keywords["beta"])
            else:
                torch.bmm(a, a.mT)

        lines.append(line("  cuBLAS", whole, flops=flops))
    return lines


def line(label: str, run: Callable[[], None], floor: float | None = None, flops: float | None = None) -> dict[str, Any]:
    """Times a call and prints what it needed."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds, spread = timed(run)
    found = {
        "label": label,
        "ms": seconds * 1e3,
        "spread_ms": spread * 1e3,
        "peak_gb": (torch.cuda.max_memory_allocated() - before) / 1e9,
    }
    text = f"{label:52s} {seconds * 1e3:9.3f} ms (+- {spread * 1e3:.3f})  peak {found['peak_gb']:6.2f} GB"
    if floor is not None:
        found["of_floor"] = floor / seconds
        text += f"  {floor / seconds:.3f} of the floor"
    if flops is not None:
        found["tflops"] = flops / seconds / 1e12
        text += f"  {found['tflops']:.0f} TFLOP/s"
    print(text, flush=True)
    return found


def timed(run: Callable[[], None], repeats: int = 15, warm: int = 3) -> tuple[float, float]:
    """Median and half the distance between the quartiles, in seconds."""
    for _ in range(warm):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    torch.cuda.synchronize()
    for start, end in zip(marks[::2], marks[1::2], strict=True):
        torch.cuda._sleep(2_000_000)  # so that the host is ahead, and launches are not what is timed
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) / 1e3 for a, b in zip(marks[::2], marks[1::2], strict=True)]
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, (high - low) / 2


def copy_rate() -> float:
    """Bytes read and written a second by a copy of 2 GB."""
    source = torch.ones(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source))[0]


def matmul_rate() -> float:
    """Operations a second of a product of 8192^3 in bfloat16, of normal numbers."""
    case = Case(sizes=(1,), dtype=torch.bfloat16)
    a, b = (case.normal(name, 8192, 8192, device="cuda") for name in "ab")
    return 2 * 8192**3 / timed(lambda: torch.mm(a, b))[0]


if __name__ == "__main__":
    main()
