"""Second implementations of losses and estimates by Python loops, each with mistakes that can be planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from areno_fn.contracts.actions import Actions, Comparisons, Estimates, Sums

Fault = str | None


def _sums(terms: list[torch.Tensor], count: float | None = None) -> Sums:
    total = torch.stack(terms).sum()
    weight = torch.tensor(float(len(terms)) if count is None else count, dtype=total.dtype)
    return Sums(total=total, weight=weight, stats={}, peaks={})


def preference(fault: Fault) -> Callable[..., Any]:
    """The losses over pairs, one pair at a time."""

    def build(
        beta: float = 0.1, *, loss: str = "sigmoid", label_smoothing: float = 0.0
    ) -> Callable[[Comparisons], Sums]:
        def stage(pairs: Comparisons) -> Sums:
            count = pairs.documents // 2
            terms = []
            for k in range(count):
                sides = (k, k + count) if fault == "halves for pairs" else (2 * k, 2 * k + 1)
                means = loss == "ipo"
                if fault == "mean for sum":
                    means = not means
                s = []
                for document in sides:
                    own = pairs.segments == document
                    change = pairs.logp[own] - (0 if fault == "reference forgotten" else pairs.reference[own])
                    s.append(change.mean() if means else change.sum())
                x = beta * (s[1] - s[0] if fault == "swapped" else s[0] - s[1])
                if fault == "beta forgotten":
                    x = x / beta
                terms.append(_of_pair(x, beta, loss, label_smoothing, fault))
            return _sums(terms, float(pairs.documents) if fault == "mean over documents" else None)

        return stage

    return build


def _of_pair(x: torch.Tensor, beta: float, loss: str, smoothing: float, fault: Fault) -> torch.Tensor:
    if loss == "ipo":
        return (x / beta - (1 / beta if fault == "ipo aims at 1 / beta" else 1 / (2 * beta))) ** 2
    if loss == "hinge":
        return 1 - x if fault == "hinge without its corner" or x < 1 else 0 * x
    right, wrong = torch.log(1 + torch.exp(-x)), torch.log(1 + torch.exp(x))
    e = 0.0 if fault == "smoothing forgotten" else 1 - smoothing if fault == "smoothing inverted" else smoothing
    return (1 - e) * right + e * wrong


def sequence_clipped(fault: Fault) -> Callable[..., Any]:
    """The surrogate of sequences, one at a time."""

    def build(low: float = 3e-4, high: float = 4e-4, *, importance_cap: float = 0.0) -> Callable[[Actions], Sums]:
        def stage(a: Actions) -> Sums:
            terms = []
            for document in range(a.documents):
                own = a.segments == document
                change = a.logp[own] - (a.logp[own].detach() if fault == "ratio against itself" else a.old[own])
                ratio = torch.exp(change.sum() if fault == "sum for mean" else change.mean())
                if fault == "mean of ratios":
                    ratio = torch.exp(change).mean()
                advantage = a.advantage[own][0]
                bounds = (1 - high, 1 + low) if fault == "bounds swapped" else (1 - low, 1 + high)
                inside = ratio if fault == "never clips" else ratio.clamp(*bounds)
                pick = torch.maximum if fault == "maximum for minimum" else torch.minimum
                term = -pick(ratio * advantage, inside * advantage)
                if importance_cap and a.rollout is not None:
                    moved = a.logp[own] if fault == "importance carries a gradient" else a.old[own]
                    change = moved - a.rollout[own]
                    weight = torch.exp(change.sum() if fault == "importance of the sum" else change.mean())
                    term = term * (weight if fault == "importance not truncated" else weight.clamp(max=importance_cap))
                terms += [term] * (int(own.sum()) if fault == "a term a token" else 1)
            return _sums(terms)

        return stage

    return build


def gae(fault: Fault) -> Callable[..., Any]:
    """Advantages of tokens, one row at a time over the tokens that are left."""

    def run(rewards: Any, values: Any, mask: Any, *, gamma: float = 1.0, lam: float = 0.95) -> Any:
        found, returns = torch.zeros_like(values), torch.zeros_like(values)
        for row in range(mask.shape[0]):
            places = list(range(mask.shape[1])) if fault == "mask ignored" else mask[row].nonzero().flatten().tolist()
            after, later = 0.0, 0.0
            for place in reversed(places):
                r, v = float(rewards[row, place]), float(values[row, place])
                bootstrap = 0.0 if fault == "no bootstrap" else later
                delta = r + bootstrap * (1.0 if fault == "value not discounted" else gamma) - v
                decay = {"lambda forgotten": gamma, "gamma forgotten": lam}.get(fault or "", gamma * lam)
                after = delta + decay * after
                later = v
                found[row, place] = after
                returns[row, place] = after + (0.0 if fault == "returns are advantages" else v)
        return found, returns

    return run


def value_clipped(fault: Fault) -> Callable[..., Any]:
    """The value loss, one decision at a time."""

    def build(clip: float = 0.5, *, coef: float = 0.5) -> Callable[[Estimates], Sums]:
        def stage(e: Estimates) -> Sums:
            terms = []
            for value, old, target in zip(e.value, e.old, e.returns, strict=True):
                centre = target if fault == "clipped around the return" else old
                near = value if fault == "never clips" else centre + (value - centre).clamp(-clip, clip)
                pick = torch.minimum if fault == "minimum for maximum" else torch.maximum
                error = (near - target) ** 2 if fault == "clipped error alone" else None
                error = pick((value - target) ** 2, (near - target) ** 2) if error is None else error
                terms.append(
                    (1.0 if fault == "not halved" else 0.5) * (1.0 if fault == "coef forgotten" else coef) * error
                )
            return _sums(terms)

        return stage

    return build


def corrected(fault: Fault) -> Callable[..., Any]:
    """The clipped surrogate with a dual clip and importance weights, one decision at a time."""

    def build(*, dual: float = 0.0, importance_cap: float = 0.0) -> Callable[[Actions], Sums]:
        def stage(a: Actions) -> Sums:
            terms = []
            rollout = a.old if a.rollout is None else a.rollout
            for logp, old, advantage, drawn in zip(a.logp, a.old, a.advantage, rollout, strict=True):
                ratio = torch.exp(logp - old)
                term = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                if dual and (advantage < 0 or fault == "dual clip for every advantage") and fault != "dual forgotten":
                    bound = -advantage * dual
                    term = (
                        torch.maximum(term, bound) if fault == "dual bounds from below" else torch.minimum(term, bound)
                    )
                if importance_cap:
                    moved = logp if fault == "weight carries a gradient" else old
                    change = drawn - old if fault == "weight inverted" else moved - drawn
                    weight = torch.exp(change)
                    term = term * (weight if fault == "weight not truncated" else weight.clamp(max=importance_cap))
                terms.append(term)
            return _sums(terms)

        return stage

    return build


def baselines(fault: Fault) -> Callable[..., torch.Tensor]:
    """Advantages against the others of a group or against the batch, by Python loops."""

    def run(rewards: torch.Tensor, groups: torch.Tensor, *, baseline: str, scale: str) -> torch.Tensor:
        r, g = rewards.tolist(), groups.tolist()
        found = []
        for i, reward in enumerate(r):
            members = [k for k in range(len(r)) if baseline == "batch" or g[k] == g[i]]
            if fault == "others of the batch":
                members = list(range(len(r)))
            itself = baseline == "leave_one_out" and fault != "itself included"
            others = [k for k in members if not (itself and k == i)]
            found.append(reward - sum(r[k] for k in others) / len(others))
        if scale == "batch" and fault != "not scaled":
            mean = sum(r) / len(r)
            correction = 1 if fault == "std divides by n - 1" else 0
            spread = (sum((x - mean) ** 2 for x in r) / (len(r) - correction)) ** 0.5
            found = [x / spread for x in found]
        return torch.tensor(found, dtype=rewards.dtype)

    return run


def whiten(fault: Fault) -> Callable[..., torch.Tensor]:
    """Standard scores over a mask, by Python loops."""

    def run(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if fault == "every row by itself" and len(values) > 1:
            return torch.cat([run(v[None], m[None]) for v, m in zip(values, mask, strict=True)])
        flat, kept = values.flatten().tolist(), mask.flatten().tolist()
        own = [v for v, here in zip(flat, kept, strict=True) if here or fault == "mask ignored"]
        mean = sum(own) / len(own)
        spread = (sum((v - mean) ** 2 for v in own) / (len(own) - (fault == "divides by n - 1"))) ** 0.5
        if fault == "epsilon for a spread of nothing":
            spread = (spread**2 + 1e-16) ** 0.5
        elif spread <= 1e-6:
            spread = 1.0
        shift = mean if fault == "mean kept" else 0.0
        found = [(v - mean) / spread + shift if here else 0.0 for v, here in zip(flat, kept, strict=True)]
        return torch.tensor(found, dtype=values.dtype).view(values.shape)

    return run


def adapted(fault: Fault) -> Callable[..., float]:
    """The proportional controller."""

    def run(coef: float, measured: float, *, target: float, count: int, horizon: float) -> float:
        error = (target - measured if fault == "turned round" else measured - target) / target
        if fault != "error not clipped":
            error = max(-0.2, min(0.2, error))
        return coef * (1 + error * (1.0 if fault == "horizon not read" else count / horizon))

    return run


def explained(fault: Fault) -> Callable[..., float]:
    """The share of the variance of returns that values explain."""

    def variance(numbers: list[float]) -> float:
        mean = 0.0 if fault == "second moments" else sum(numbers) / len(numbers)
        return sum((x - mean) ** 2 for x in numbers) / len(numbers)

    def run(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
        kept = [True] * len(mask) if fault == "mask ignored" else mask.tolist()
        v, r = ([x for x, here in zip(y.tolist(), kept, strict=True) if here] for y in (values, returns))
        whole = variance(v if fault == "over the variance of values" else r)
        if whole == 0 and fault != "nothing to explain is divided by":
            return 0.0
        share = variance([a - b for a, b in zip(r, v, strict=True)]) / whole if whole else float("nan")
        return share if fault == "what is left" else 1 - share

    return run
