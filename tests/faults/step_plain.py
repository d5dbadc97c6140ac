"""Second implementations of the numeric parts, written without the library's, each with named faults.

`fault=None` is right; every other value of `fault` is a mistake that public tools have made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.actions import Actions, Sums
from areno_fn.contracts.optim import Optimizer, Transform
from areno_fn.contracts.spec import AdamWSpec, Schedule

Fault = str | None


def accumulate(fault: Fault) -> Callable[..., Any]:
    """Gradient of (sum of totals) / (sum of weights)."""

    def build(objective: Callable[..., Sums]) -> Callable[..., Any]:
        def gradient_of(params: Any, batches: Any) -> tuple[Any, Sums]:
            parts = [objective(params, batch) for batch in batches]
            slopes = [value_and_grad(lambda p, b: objective(p, b).total)(params, batch)[1] for batch in batches]
            total, weight = sum(p.total for p in parts), sum(p.weight for p in parts)
            if fault in ("mean of means", "sum of means"):
                share = len(parts) if fault == "mean of means" else 1
                factors = [weight / p.weight / share for p in parts]
                slopes = [tree.map(lambda g, f=f: g * f, s) for s, f in zip(slopes, factors, strict=True)]
            elif fault == "last micro-batch only":
                slopes = slopes[-1:]
            wide = torch.bfloat16 if fault == "accumulates in bfloat16" else torch.float64
            gradient = tree.map(lambda *g: _add_up([x.to(wide) for x in g]), *slopes)
            divisor = weight if weight or fault == "divides by zero" else torch.tensor(math.inf)
            return tree.map(lambda g: g / divisor, gradient), Sums(total=total, weight=weight, stats={}, peaks={})

        return gradient_of

    return build


def _add_up(values: list[torch.Tensor]) -> torch.Tensor:
    first, *rest = values
    for value in rest:
        first = first + value
    return first


def aggregate(fault: Fault) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Means over decisions, by loops over documents."""

    def run(values: Any, weight: Any, segments: Any, documents: int, how: str, constant: float | None = None) -> Any:
        if fault == "mask multiplies":
            values, weight = values * weight, torch.ones_like(weight) * weight
            kept = torch.ones_like(weight, dtype=torch.bool)
        else:
            kept = weight != 0
        if how == "token_mean":
            count = weight.numel() if fault == "denominator counts the masked" else weight.sum()
            total = (values[kept] * weight[kept]).sum()
            return total, torch.as_tensor(
                count + (1e-6 if fault == "epsilon in the denominator" else 0.0), dtype=values.dtype
            )
        total, live = values.new_zeros(()), 0
        for document in range(documents):
            own = kept & (segments == document)
            if weight[own].sum() == 0 and fault != "denominator counts the masked":
                continue
            divisor = {
                "seq_mean_token_sum": 1.0,
                "seq_mean_token_mean": weight[own].sum(),
                "constant_length": constant,
            }[how]
            if fault == "token sum is averaged" and how == "seq_mean_token_sum":
                divisor = weight[own].sum()
            if own.any():
                total = total + (values[own] * weight[own]).sum() / divisor
            live += 1
        return total, values.new_tensor(float(live))

    return run


def kl(fault: Fault) -> Callable[..., torch.Tensor]:
    """The estimators, from their formulas."""

    def run(logp: torch.Tensor, reference: torch.Tensor, estimator: str = "k3") -> torch.Tensor:
        d = (reference - logp) if fault == "difference reversed" else (logp - reference)
        if fault == "computed without gradient":
            d = d.detach()
        if estimator == "k1":
            return d
        if estimator == "k2":
            return d**2 / (1 if fault == "k2 not halved" else 2)
        clamped = d.clamp(-20, 20)
        if fault == "clamp keeps the gradient":
            clamped = d + (clamped - d).detach()
        if fault == "not clamped":
            clamped = d
        return torch.exp(-clamped) - 1 + clamped

    return run


def clipped(fault: Fault) -> Callable[..., Any]:
    """The surrogate, one decision at a time, token mean."""

    def build(low: float = 0.2, high: float = 0.2, *, kl_coef: float = 0.0) -> Callable[[Actions], Sums]:
        def stage(a: Actions) -> Sums:
            terms = []
            reference = a.old if a.reference is None else a.reference
            for logp, old, advantage, ref in zip(a.logp, a.old, a.advantage, reference, strict=True):
                behaviour = logp.detach() if fault == "ratio against itself" else old
                ratio = torch.exp(behaviour - logp if fault == "ratio inverted" else logp - behaviour)
                bounds = (1 - low, 1 + high)
                if fault == "bounds swapped":
                    bounds = (1 - high, 1 + low)
                elif fault == "bounds not around 1":
                    bounds = (-low, high)
                inside = ratio if fault == "never clips" else ratio.clamp(*bounds)
                pick = torch.maximum if fault == "maximum for minimum" else torch.minimum
                loss = -pick(ratio * advantage, inside * advantage)
                if fault == "clips both ways":
                    loss = -inside * advantage
                if fault == "sign of the loss":
                    loss = -loss
                term = kl(None)(logp, ref)
                coefficient = {"kl subtracted": -kl_coef, "kl forgotten": 0.0}.get(fault or "", kl_coef)
                terms.append(loss + coefficient * (term.detach() if fault == "kl without gradient" else term))
            total = torch.stack(terms).sum()
            return Sums(total=total, weight=torch.tensor(float(len(terms)), dtype=total.dtype), stats={}, peaks={})

        return stage

    return build


def group_advantages(fault: Fault) -> Callable[..., torch.Tensor]:
    """Deviations from the group, by Python loops."""

    def run(rewards: torch.Tensor, groups: torch.Tensor, *, scale: str = "group", eps: float = 1e-8) -> torch.Tensor:
        r, g = rewards.tolist(), groups.tolist()
        if fault == "groups are rows in order":
            g = [i // 2 for i in range(len(r))]
        correction = 1 if fault == "std divides by n - 1" else 0
        if fault == "scopes swapped":
            scale = {"group": "batch", "batch": "group"}.get(scale, scale)

        def std(values: list[float]) -> float:
            mean = math.fsum(values) / len(values)
            variance = math.fsum((v - mean) ** 2 for v in values) / max(len(values) - correction, 1)
            return math.sqrt(variance + eps) if fault == "epsilon inside the root" else math.sqrt(variance)

        result = []
        for reward, group in zip(r, g, strict=True):
            own = [v for v, other in zip(r, g, strict=True) if other == group]
            centre = math.fsum(own) / len(own)
            if fault in ("not centred", "centred on the batch"):
                centre = 0.0 if fault == "not centred" else math.fsum(r) / len(r)
            spread = {"group": std(own), "batch": std(r), "none": 1 - eps}[scale]
            slack = 0.0 if fault in ("no epsilon", "epsilon inside the root") else eps
            result.append((reward - centre) / (spread + slack) if spread + slack else math.nan)
        return torch.tensor(result, dtype=rewards.dtype)

    return run


def learning_rate(fault: Fault) -> Callable[..., Callable[[int], float]]:
    """Schedules in Python floats."""

    def build(spec: Schedule, base: float, total: int) -> Callable[[int], float]:
        def rate(step: int) -> float:
            step -= fault == "counts from zero"
            step += fault == "one ahead"
            warmup = spec.warmup_steps
            if step < warmup:
                return base * (step + 1 if fault == "warm-up one ahead" else step) / warmup
            start = warmup + (spec.stable_steps if spec.kind == "wsd" and fault != "no stable part" else 0)
            length = total if fault == "decay ignores warm-up" else total - start
            progress = min(max((step - start) / max(length, 1), 0.0), 1.0)
            if fault == "progress not clipped":
                progress = (step - start) / max(length, 1)
            remaining = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * progress)) / 2}.get(spec.kind, 1 - progress)
            low = 0.0 if fault == "minimum ignored" else spec.min_lr
            return base * remaining + low * (1 - remaining)

        return rate

    return build


def clip_by_global_norm(fault: Fault) -> Callable[[float], Transform]:
    """Clipping by the norm of all leaves."""

    def build(limit: float) -> Transform:
        def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
            leaves = tree.leaves(updates)
            norm = math.sqrt(sum(float((leaf.double() ** 2).sum()) for leaf in leaves))
            factor = limit / (norm + 1e-6)
            factor = {"scales up": factor, "maximum for minimum": max(1.0, factor), "sign lost": -min(1.0, factor)}.get(
                fault or "", min(1.0, factor)
            )
            if fault == "by the squared norm":
                factor = min(1.0, limit / (norm**2 + 1e-6))
            if fault == "each leaf alone":
                return tree.map(lambda g: g * min(1.0, limit / (float(g.norm()) + 1e-6)), updates), state
            if fault == "by value":
                return tree.map(lambda g: g.clamp(-limit, limit), updates), state
            return tree.map(lambda g: g * factor, updates), state

        return Transform(init=lambda params: (), update=update)

    return build


def adamw(fault: Fault) -> Callable[[AdamWSpec, int], Optimizer]:
    """AdamW, one leaf at a time."""

    def build(spec: AdamWSpec, total: int) -> Optimizer:
        rate, clip = learning_rate(None)(spec.schedule, spec.lr, total), clip_by_global_norm(None)
        b1, b2 = spec.betas

        def init(params: Any) -> dict[str, Any]:
            zeros = tree.map(lambda p: torch.zeros_like(p, dtype=torch.float64), params)
            return {"t": 0, "m": zeros, "n": zeros, "master": tree.map(lambda p: p.double(), params)}

        def move(
            p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, n: torch.Tensor, t: int
        ) -> tuple[torch.Tensor, ...]:
            lr = rate(t if fault != "rate one ahead" else t + 1)
            decay = spec.weight_decay if p.ndim >= 2 or fault == "decay on norms" else 0.0
            if fault == "decay in the gradient":
                g, decay = g + decay * p, 0.0
            m, n = b1 * m + (1 - b1) * g, b2 * n + (1 - b2) * (g if fault == "second moment of g" else g * g)
            late = t - 1 if fault == "bias one late" else t
            c1, c2 = (1.0, 1.0) if fault == "no bias correction" else (1 - b1**late or 1.0, 1 - b2**late or 1.0)
            root = (
                (n.abs() / c2 + spec.eps).sqrt() if fault == "eps inside the root" else (n.abs() / c2).sqrt() + spec.eps
            )
            step = m / c1 / root
            factor = 1.0 if fault == "decay without the rate" else lr
            sign = 1 if fault == "ascends" else -1
            return p + sign * lr * step - factor * decay * p, m, n

        def apply(gradients: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
            t = state["t"] + 1
            if fault != "clip forgotten":
                gradients, _ = clip(spec.max_grad_norm or math.inf).update(gradients, (), params)
            truth = params if fault == "cast copy is the truth" else state["master"]
            rows = [
                move(p.double(), g.double(), m, n, t)
                for p, g, m, n in zip(
                    *(tree.leaves(x) for x in (truth, gradients, state["m"], state["n"])), strict=True
                )
            ]
            master, m, n = (tree.unflatten(params, column) for column in zip(*rows, strict=True))
            stored = tree.map(lambda new, old: new.to(old.dtype), master, params)
            if fault == "writes into its argument":
                tree.map(lambda old, new: old.copy_(new), params, stored)
            return stored, {"t": t, "m": m, "n": n, "master": master}, {}

        return Optimizer(init=init, apply=apply)

    return build
