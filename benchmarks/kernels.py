"""Time of every kernel at the shapes that training runs at, against what the hardware allows and against torch.

    python -m benchmarks.kernels [--json kernels.json] [--only rms_norm token_logp]
    python -m benchmarks.kernels --record kernels.json       writes areno_fn/kernels/measured.py

The floor of a case is the larger of its bytes over the copy rate and its operations over the matmul rate, both
measured in the same process. Every time is the median of repeats, each over inputs that do not fit into the cache, with the
spread between the first and the third quartile. Forward and backward are timed together, those of
attention with windows and soft caps apart.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex

from areno_fn.kernels.attention import PackedLayout, equal_documents, packed_attention, packed_layout
from areno_fn.kernels.law import Arguments, Case, Cases, cotangents_of, pulled
from areno_fn.kernels.linear_token_loss import linear_token_loss
from areno_fn.kernels.symmetric_product import symmetric_product
from benchmarks import needs

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
REST = 0.25
"""Seconds of a pause."""


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
    needs.gpu("the time of a Triton kernel")
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
    own = [line for line in found["lines"] if not line["label"].startswith(" ")]  # those of peers are set in
    lines = [f"    ({json.dumps(label)}, {json.dumps(line)})," for label, line in map(_sentence, own)]
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
        file.write(text)


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
    return [*lines, *head_lines(rates)] if name == "linear_token_loss" else lines


def head_lines(rates: dict[str, float]) -> list[dict[str, Any]]:
    """The head at numbers of rows that are made at once, beside its three products by cuBLAS and nothing else.

    A GPU that multiplies for long is slowed by the power it may draw. So calls are timed in a row, as they are
    elsewhere, and with a pause before each, in which it rests.
    """
    count, width, size = LARGE.sizes
    cases: Cases = importlib.import_module("areno_fn.kernels.linear_token_loss.cases").CASES
    put_product = importlib.import_module("areno_fn.kernels.linear_token_logp.triton").put_product
    hidden, weight, targets, slopes, _ = cases.build(LARGE, "cuda").positional
    given = (hidden.requires_grad_(), weight.requires_grad_())
    floor = 6 * count * width * size / rates["matmul"]
    lines = []
    for rows in (2048, 1024):

        def ours(rows: int = rows) -> None:
            lever, _, _ = linear_token_loss(
                *given, targets, lambda first, logp, _: slopes[first : first + len(logp)], chunk=rows * size
            )
            torch.autograd.grad(lever, given)

        def products(rows: int = rows) -> None:
            x, w = (a.detach() for a in given)
            total = torch.empty(weight.shape, dtype=torch.float32, device="cuda")
            logits = torch.empty(rows, size, dtype=x.dtype, device="cuda")
            for first in range(0, count, rows):
                torch.mm(x[first : first + rows], w.t(), out=logits)
                torch.mm(logits, w, out_dtype=torch.float32)
                put_product(total, logits.t(), x[first : first + rows], more=first > 0)

        for how, rest in (("in a row", 0.0), ("after rests", REST)):
            lines.append(line(f"linear_token_loss {rows} rows at once, {how}", ours, floor=floor, rest=rest))
            lines.append(line(f"  its products alone, {rows} rows, {how}", products, floor=floor, rest=rest))
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


def bent_lines(only: slice = slice(None), peer: bool = True) -> list[dict[str, Any]]:
    """Windows and soft caps, passes apart, beside torch's flex_attention, compiled; only pairs that are seen count.

    The peer is given the same cap and mask, and documents end to end with the blocks in which nothing is seen left out; making its
    mask is not timed. Errors are those of all results against float64, relative.
    """
    cases: Cases = importlib.import_module("areno_fn.kernels.attention.cases").CASES
    lines = []
    for case in cases.hot[only]:
        arguments = cases.build(case, "cuda")
        cotangents = cotangents_of(cases, case, arguments)
        exact = attrs.evolve(
            arguments, positional=tuple(x.double() if i < 3 else x for i, x in enumerate(arguments.positional))
        )
        wanted = pulled(cases.oracle, exact, (0,), tuple(x.double() for x in cotangents))
        label = f"{'x'.join(map(str, case.sizes))} {case.variant}".strip()
        ours = functools.partial(packed_attention, **arguments.keywords)
        sides = [(f"attention {label}", ours)]
        if peer:
            sides.append(("  flex_attention", flexed(arguments)))
        for name, function in sides:
            lines += _passes(cases, case, name, function, arguments, cotangents, wanted)
        del wanted, exact
        torch.cuda.empty_cache()
    return lines


def _passes(
    cases: Cases, case: Case, label: str, function: Any, arguments: Arguments, cotangents: Any, wanted: Any
) -> list[dict[str, Any]]:
    """A line for the forward and one for the backward."""
    kept = attrs.evolve(arguments, keywords={})
    got = pulled(function, kept, (0,), cotangents)
    errors = [_relative(x, y) for x, y in zip((*got[0], *got[1]), (*wanted[0], *wanted[1]), strict=True)]
    print(f"{label}: errors " + " ".join(f"{x:.1e}" for x in errors), flush=True)
    del got
    given = list(arguments.positional)
    for i in arguments.moving:
        given[i] = given[i].detach().requires_grad_()
    out = function(*given)
    sides = given[:3]
    floors = (cases.forward_floor(case), cases.backward_floor(case))
    return [
        line(f"{label}, forward", lambda: function(*given), flops=floors[0].flops),
        line(
            f"{label}, backward",
            lambda: torch.autograd.grad(out, sides, cotangents, retain_graph=True),
            flops=floors[1].flops,
        ),
    ]


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm()).item()


def flexed(arguments: Arguments) -> Callable[..., torch.Tensor]:
    """torch's flex_attention with the window and the cap of a case, over its documents."""
    layout: PackedLayout = arguments.positional[3]
    window, cap = arguments.keywords["window"], arguments.keywords["soft_cap"]
    count = layout.tokens
    device = arguments.positional[0].device
    edges = torch.arange(layout.documents + 1, device=device) * layout.longest if layout.edges is None else layout.edges
    document = torch.bucketize(torch.arange(count, device=device), edges, right=True)

    def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        del batch, head
        found = (query >= key) & (document[query] == document[key])
        return found & (query - key < window) if window else found

    def bent(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        del batch, head, query, key
        return cap * torch.tanh(score / cap)

    # a graph that is kept for another backward pass may not give its memory away
    torch._functorch.config.donated_buffer = False
    mask = flex.create_block_mask(seen, None, None, count, count, device=device)
    compiled = torch.compile(flex.flex_attention, dynamic=False)

    def attention(q: Any, k: Any, v: Any, layout: Any, scale: float) -> torch.Tensor:
        del layout
        beside = (x.transpose(0, 1)[None] for x in (q, k, v))
        out: torch.Tensor = compiled(
            *beside, score_mod=bent if cap else None, block_mask=mask, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    return attention


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


def line(
    label: str, run: Callable[[], None], floor: float | None = None, flops: float | None = None, rest: float = 0.0
) -> dict[str, Any]:
    """Times a call and prints what it needed."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds, spread = timed(run, rest=rest)
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


def timed(run: Callable[[], None], repeats: int = 15, warm: int = 3, rest: float = 0.0) -> tuple[float, float]:
    """Median and half the distance between the quartiles, in seconds, of calls with a pause before each, if one is given."""
    for _ in range(warm):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    torch.cuda.synchronize()
    for start, end in zip(marks[::2], marks[1::2], strict=True):
        if rest:
            torch.cuda.synchronize()
            time.sleep(rest)
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
    needs.run(main)
