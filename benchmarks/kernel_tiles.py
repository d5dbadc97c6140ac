"""Tiles and schedules of kernels, each checked against float64 and timed.

    python -m benchmarks.kernel_tiles --check [--only head rms_norm ...]
    python -m benchmarks.kernel_tiles [--only ...] [--seconds 140]

A kernel's own choice is one of them. Forward and backward are timed apart, as a fraction of their floor. The first command compares
and times nothing; several may run at once, and what they compile the second one finds in Triton's cache.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
import triton

from areno_fn.kernels import gates
from areno_fn.kernels.launch import Steps
from areno_fn.kernels.law import Case, Cases, against_oracle, cotangents_of
from areno_fn.kernels.linear_token_logp import linear_token_logp
from areno_fn.kernels.linear_token_loss import linear_token_loss
from benchmarks import needs
from benchmarks.kernels import LARGE, copy_rate, matmul_rate, timed

_CHECKS: list[bool] = []
"""Whether variants are compared instead of timed."""
PARTS = ("head", "rms_norm", "norm_rotary", "add_rms_norm", "gated", "rms_heads", "attention", "attention_wide")


def main() -> None:
    """Measures what there is time for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    needs.gpu("the time of a tile")
    until = time.monotonic() + options.seconds
    _CHECKS.append(options.check)
    rates = (1.0, 1.0) if options.check else (copy_rate(), matmul_rate())
    print(f"copy {rates[0] / 1e9:.0f} GB/s, matmul {rates[1] / 1e12:.0f} TFLOP/s", flush=True)
    for name in options.only:
        if time.monotonic() < until:
            globals()[f"_{name}"](rates, until)
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------- the head


def _head(rates: tuple[float, float], until: float) -> None:
    triton_part = importlib.import_module("areno_fn.kernels.linear_token_loss.triton")
    count, width, size = LARGE.sizes
    hidden = LARGE.normal("hidden", count, width, device="cuda")
    weight = LARGE.normal("weight", size, width, device="cuda") * (LARGE.magnitude / width**0.5)
    targets = torch.randint(size, (count,), generator=torch.Generator().manual_seed(1)).cuda()
    slopes = LARGE.normal("slope", count, device="cuda", dtype=torch.float32)
    _head_is_right(triton_part)
    floor = 6 * count * width * size / rates[1]
    print(f"floor of three products {floor * 1e3:.2f} ms")
    for rows in (1024, 2048):
        a = torch.empty(rows, size, dtype=torch.bfloat16, device="cuda")
        part, times = hidden[:rows], count // rows
        total = torch.zeros(size, width, device="cuda")
        narrow = torch.zeros(size, width, dtype=torch.bfloat16, device="cuda")
        product = 2 * rows * width * size / rates[1]

        def show(label: str, run: Callable[[], Any], ideal: float, times: int = times) -> None:
            seconds = _seconds(run, 5)
            print(f"  {label:42s} {seconds * 1e3 * times:7.3f} ms for all rows, {ideal / seconds:.3f}", flush=True)

        print(f"{rows} rows at once")
        show("logits", lambda a=a, part=part: torch.mm(part, weight.t(), out=a), product)
        for parts in (1, 2, 4, 8):

            def into_hidden(a: Any = a, parts: int = parts) -> Any:
                if parts == 1:
                    return torch.mm(a, weight, out_dtype=torch.float32)
                pieces = a.unflatten(1, (parts, -1)).transpose(0, 1)
                return torch.bmm(pieces, weight.unflatten(0, (parts, -1)), out_dtype=torch.float32).sum(0)

            show(f"into hidden, cut in {parts}", into_hidden, product)
        show("into hidden, bf16", lambda a=a: torch.mm(a, weight), product)
        show("into weight, float32", lambda a=a, t=total, p=part: triton_part.put_product(t, a.t(), p, True), product)
        show("into weight, bf16", lambda a=a, t=narrow, p=part: t.addmm_(a.t(), p), product)
        torch.mm(part, weight.t(), out=a)
        kept = a.clone()
        logp, entropy = (torch.empty(rows, device="cuda") for _ in range(2))
        moved = 2 * a.nbytes / rates[0]
        show("a copy of the logits", lambda a=a, k=kept: a.copy_(k), moved)
        for step in (
            Steps(8192, 16, 3, 16), Steps(8192, 16, 3, 32), Steps(16384, 32, 2, 32), Steps(16384, 32, 3, 32),
            Steps(8192, 8, 3, 16), Steps(4096, 8, 4, 32), Steps(8192, 32, 4, 32), Steps(4096, 16, 4, 32),
        ):  # fmt: skip
            triton_part.walk = lambda size, step=step: step
            turn = lambda a=a, t=targets[:rows], p=logp, e=entropy: triton_part.turn(t, p, e, a, 1.0)  # noqa: E731
            a.copy_(kept)
            show(f"turn {tuple(step)}", turn, moved)
        del a, total, narrow, kept
    importlib.reload(triton_part)
    if _CHECKS[0]:
        return
    hidden.requires_grad_()
    weight.requires_grad_()

    def later(chunk: int) -> None:
        logp, _ = linear_token_logp(hidden, weight, targets, chunk=chunk)
        torch.autograd.grad(logp, (hidden, weight), slopes)

    def at_once(rows: int) -> None:
        lever, _, _ = linear_token_loss(
            hidden, weight, targets, lambda first, logp, _: slopes[first : first + len(logp)], chunk=rows * size
        )
        torch.autograd.grad(lever, (hidden, weight))

    for label, run in (
        ("four products, 2^27 logits", lambda: later(2**27)),
        ("four products, 2^28 logits", lambda: later(2**28)),
        ("three products, 1024 rows", lambda: at_once(1024)),
        ("three products, 1536 rows", lambda: at_once(1536)),
        ("three products, 2048 rows", lambda: at_once(2048)),
        ("three products, 4096 rows", lambda: at_once(4096)),
    ):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds, spread = timed(run, 7, 2)
        peak = (torch.cuda.max_memory_allocated() - before) / 1e9
        print(
            f"{label:32s} {seconds * 1e3:8.3f} ms (+- {spread * 1e3:.3f}), {floor / seconds:.3f}, peak {peak:.2f} GB",
            flush=True,
        )


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    if _CHECKS[0]:
        run()
        return 1.0
    return timed(run, repeats, 2)[0]


def _head_is_right(triton_part: Any) -> None:
    case = Case(sizes=(300, 64, 5003), dtype=torch.bfloat16, magnitude=3.0)
    hidden, weight = case.normal("h", 300, 64, device="cuda"), case.normal("w", 5003, 64, device="cuda") * 0.4
    targets = torch.arange(300, device="cuda") * 16
    slopes = case.normal("s", 300, device="cuda", dtype=torch.float64)
    given = tuple(x.detach().requires_grad_() for x in (hidden, weight))
    lever, logp, entropy = linear_token_loss(
        *given, targets, lambda first, logp, _: slopes[first : first + len(logp)].float(), 0.7, chunk=128 * 5003
    )
    got = torch.autograd.grad(lever, given)
    exact = tuple(x.detach().double().requires_grad_() for x in (hidden, weight))
    every = (exact[0] @ exact[1].t() * 0.7).log_softmax(-1)
    want_logp = every.gather(1, targets[:, None])[:, 0]
    want = torch.autograd.grad((want_logp * slopes).sum(), exact)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]
    errors.append((logp.double() - want_logp).abs().max().item())
    errors.append((entropy.double() + (every.exp() * every).sum(-1)).abs().max().item())
    print(
        "head against float64: gradients",
        *(f"{x:.1e}" for x in errors[:2]),
        "logp and entropy",
        *(f"{x:.1e}" for x in errors[2:]),
    )


# ---------------------------------------------------------------------------------------- rows


@attrs.frozen
class _Variant:
    """A choice: its words, and the attributes of a module that make it."""

    label: str
    module: Any
    changes: dict[str, Any]


def _measure(
    cases: Cases, case: Case, variants: Iterable[_Variant], rates: tuple[float, float], until: float, side: str
) -> None:
    """Prints each variant's error against float64, and its time over that of the floor."""
    arguments = cases.build(case, "cuda")
    cotangents = cotangents_of(cases, case, arguments)
    given = list(arguments.positional)
    for i in arguments.moving:
        given[i] = given[i].detach().requires_grad_()
    some = attrs.evolve(case, sizes=tuple(min(n, 16384) for n in case.sizes))
    least = (cases.forward_floor if side == "forward" else cases.backward_floor)(case)
    floor = max(least.bytes / rates[0], least.flops / rates[1] if cases.name == "attention" else 0)
    print(f"{cases.name} {'x'.join(map(str, case.sizes))} {case.variant}, {side}, floor {floor * 1e3:.3f} ms")
    found = []
    for variant in variants:
        if time.monotonic() > until:
            print("  no time for the rest")
            break
        kept = {name: getattr(variant.module, name) for name in variant.changes}
        for name, value in variant.changes.items():
            setattr(variant.module, name, value)
        try:
            wrong = [d for d in against_oracle(cases, some, "cuda") if not d.fits] if _CHECKS[0] else []
            seconds = _seconds(_pass(cases, given, arguments, cotangents, side), 9)
            found.append((seconds, variant.label, bool(wrong)))
        except (triton.CompilationError, triton.runtime.OutOfResources) as error:
            print(f"  {variant.label}: {type(error).__name__} {str(error)[:100]}")
        for name, value in kept.items():
            setattr(variant.module, name, value)
    if _CHECKS[0]:
        print(f"  {len(found)} compared, wrong: {[label for _, label, wrong in found if wrong]}", flush=True)
        return
    for seconds, label, wrong in sorted(found)[:12]:
        print(f"  {label:34s} {seconds * 1e3:7.4f} ms  {floor / seconds:.3f}{'  WRONG' if wrong else ''}", flush=True)


def _pass(cases: Cases, given: list[Any], arguments: Any, cotangents: Any, side: str) -> Callable[[], Any]:
    """One pass of a kernel, forward or backward."""

    def forward() -> Any:
        result = cases.function(*given, **arguments.keywords)
        return result if isinstance(result, tuple) else (result,)

    if side == "forward":
        return forward
    outputs, moving = forward(), [given[i] for i in arguments.moving]
    asked = [outputs[i] for i in cases.answered]
    return lambda: torch.autograd.grad(asked, moving, cotangents, retain_graph=True)


def _backward_walks(name: str, rates: tuple[float, float], until: float, steps: list[Steps], which: int) -> None:
    module = importlib.import_module(f"areno_fn.kernels.{name}.triton")
    cases: Cases = importlib.import_module(f"areno_fn.kernels.{name}.cases").CASES
    variants = [_Variant("as it is", module, {})]
    variants += [_Variant(str(tuple(s)), module, {"walk": lambda *a, s=s, **k: s}) for s in steps]
    _measure(cases, cases.hot[which], variants, rates, until, "backward")


def _forward_tiles(
    name: str, rates: tuple[float, float], until: float, elements: list[tuple[int, int]], which: int
) -> None:
    module = importlib.import_module(f"areno_fn.kernels.{name}.triton")
    cases: Cases = importlib.import_module(f"areno_fn.kernels.{name}.cases").CASES
    kept = module.tile
    variants = [_Variant("as it is", module, {})]
    variants += [
        _Variant(
            f"{e} elements, {w} warps", module, {"tile": lambda n, _=0, e=e: kept(n, e), "warps": lambda n, w=w: w}
        )
        for e, w in elements
    ]
    _measure(cases, cases.hot[which], variants, rates, until, "forward")


_TILES = [(1024, 1), (1024, 2), (1024, 4), (2048, 2), (2048, 4), (4096, 4), (4096, 8), (8192, 8)]


def _rms_norm(rates: tuple[float, float], until: float) -> None:
    _forward_tiles("rms_norm", rates, until, _TILES, 0)
    steps = [
        Steps(4, 8, 3, 64),
        Steps(4, 8, 4, 32),
        Steps(4, 8, 2, 32),
        Steps(8, 16, 3, 32),
        Steps(2, 4, 3, 16),
        Steps(4, 16, 3, 32),
    ]
    _backward_walks("rms_norm", rates, until, steps, 0)


def _rms_heads(rates: tuple[float, float], until: float) -> None:
    _forward_tiles("rms_norm", rates, until, [(1024, 1), (2048, 4), (4096, 4)], 1)
    steps = [Steps(8, 4, 3, 64), Steps(8, 4, 1, 64), Steps(8, 4, 1, 32), Steps(16, 8, 3, 32), Steps(16, 4, 2, 16)]
    _backward_walks("rms_norm", rates, until, steps, 1)


def _add_rms_norm(rates: tuple[float, float], until: float) -> None:
    steps = [
        Steps(2, 4, 3, 16),
        Steps(4, 8, 2, 16),
        Steps(2, 4, 2, 8),
        Steps(2, 4, 2, 32),
        Steps(4, 8, 2, 32),
        Steps(1, 2, 2, 16),
    ]
    for which in (0, 1):
        _backward_walks("add_rms_norm", rates, until, steps, which)


def _norm_rotary(rates: tuple[float, float], until: float) -> None:
    module = importlib.import_module("areno_fn.kernels.norm_rotary.triton")
    cases: Cases = importlib.import_module("areno_fn.kernels.norm_rotary.cases").CASES
    steps = [
        Steps(8, 4, 1, 64),
        Steps(8, 4, 1, 96),
        Steps(8, 4, 1, 192),
        Steps(8, 4, 1, 384),
        Steps(4, 2, 1, 96),
        Steps(8, 2, 1, 96),
    ]
    for side in ("backward", "forward"):
        variants = [_Variant("as it is", module, {})]
        variants += [_Variant(str(tuple(s)), module, {"walk": lambda *a, s=s, **k: s}) for s in steps]
        _measure(cases, cases.hot[0], variants, rates, until, side)


def _gated(rates: tuple[float, float], until: float) -> None:
    cases: Cases = importlib.import_module("areno_fn.kernels.gated_silu.cases").CASES
    for side in ("forward", "backward"):
        variants = [_Variant("as it is", gates, {})]
        variants += [
            _Variant(str(c), gates, {"block": lambda size, c=c: c}) for c in ((2048, 8), (4096, 8), (4096, 16))
        ]
        _measure(cases, cases.hot[0], variants, rates, until, side)


def _attention(rates: tuple[float, float], until: float) -> None:
    forward = [(64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 128, 4, 2), (64, 32, 4, 3)]
    queries = [(64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 3), (128, 128, 8, 1)]
    keys = [(32, 64, 4, 3), (32, 128, 8, 2), (64, 64, 4, 2), (64, 128, 8, 2)]
    _attention_blocks(0, forward, queries, [(*k, False) for k in keys] + [(64, 64, 4, 2, True)], rates, until)


def _attention_wide(rates: tuple[float, float], until: float) -> None:
    forward = [(64, 32, 4, 2), (64, 32, 4, 3), (128, 32, 8, 2), (128, 64, 8, 2), (64, 64, 4, 1)]
    queries = [(64, 32, 4, 2), (64, 32, 4, 1), (128, 16, 8, 2), (64, 32, 8, 2)]
    keys = [(32, 64, 8, 2, False), (16, 64, 8, 2, False), (32, 64, 4, 1, True), (32, 128, 8, 2, True)]
    _attention_blocks(2, forward, queries, keys, rates, until)


def _attention_blocks(
    which: int,
    forward: list[tuple[int, ...]],
    queries: list[tuple[int, ...]],
    keys: list[tuple[Any, ...]],
    rates: tuple[float, float],
    until: float,
) -> None:
    module = importlib.import_module("areno_fn.kernels.attention.triton")
    back = importlib.import_module("areno_fn.kernels.attention.pull")
    cases: Cases = importlib.import_module("areno_fn.kernels.attention.cases").CASES
    first = [_Variant("as it is", module, {})]
    first += [_Variant(str(c), module, {"forward_blocks": lambda *_, c=c: module.Blocks(*c)}) for c in forward]
    second = [_Variant("as it is", back, {})]
    second += [_Variant(f"queries {c}", back, {"queries_blocks": lambda *_, c=c: module.Blocks(*c)}) for c in queries]
    second += [
        _Variant(f"keys {c}", back, {"keys_blocks": lambda *_, c=c: back.KeyBlocks(module.Blocks(*c[:4]), c[4])})
        for c in keys
    ]
    for side, variants, part in (("forward", first, module), ("backward", second, back)):
        bends = [_Variant("tanh of the processor", part, {"bend": lambda *_: "instruction"})]
        _measure(cases, cases.hot[which], [*variants, *bends], rates, until, side)


if __name__ == "__main__":
    needs.run(main)
