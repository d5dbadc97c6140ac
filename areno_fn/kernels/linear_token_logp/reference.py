"""The head and its log-probabilities in plain torch, over parts of the vocabulary; float32 sums (float64 for float64)."""

from __future__ import annotations

import torch


def forward(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scale: float, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logp, entropy, largest logit m and log(sum(exp(logit - m))), all [M]."""
    lowest = torch.finfo(_dtype(hidden)).min
    peak = hidden.new_full(targets.shape, lowest, dtype=_dtype(hidden))
    total, distance = torch.zeros_like(peak), torch.zeros_like(peak)
    weight[:, 0].index_select(0, targets)  # a target outside of the vocabulary is an error here
    chosen = torch.zeros_like(peak)
    for first, part in zip(range(0, weight.shape[0], columns), weight.split(columns), strict=True):
        logits = _logits(hidden, part, scale)
        larger = torch.maximum(peak, logits.amax(-1))
        growth = torch.where(total > 0, larger - peak, 0.0)
        shifted = logits - larger.unsqueeze(-1)
        e = shifted.exp()
        distance = (-growth).exp() * (distance + growth * total) - (e * shifted).sum(-1)
        total = (-growth).exp() * total + e.sum(-1)
        peak = larger
        here = (targets - first).clamp(0, part.shape[0] - 1)
        own = (targets >= first) & (targets < first + part.shape[0])
        chosen = torch.where(own, logits.gather(1, here.unsqueeze(1)).squeeze(1), chosen)
    log_sum = total.log()
    return chosen - peak - log_sum, log_sum + distance / total, peak, log_sum


def backward(
    dlogp: torch.Tensor,
    dentropy: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    scale: float,
    columns: int,
    entropy: torch.Tensor,
    peak: torch.Tensor,
    log_sum: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cotangents of hidden [M, D] and weight [V, D].

    dlogits = scale (dlogp (1[j = target] - p_j) - dentropy p_j (log p_j + H)).
    """
    dhidden = torch.zeros_like(hidden, dtype=_dtype(hidden))
    dweight = torch.empty_like(weight)
    for first, part in zip(range(0, weight.shape[0], columns), weight.split(columns), strict=True):
        every = _logits(hidden, part, scale) - (peak + log_sum).unsqueeze(-1)
        probability = every.exp()
        here = torch.arange(first, first + part.shape[0], device=hidden.device) == targets.unsqueeze(-1)
        slopes = (here.to(probability.dtype) - probability) * (scale * dlogp).unsqueeze(-1)
        if dentropy is not None:
            slopes -= probability * (every + entropy.unsqueeze(-1)) * (scale * dentropy).unsqueeze(-1)
        dlogits = slopes.to(hidden.dtype)
        dhidden += dlogits.to(dhidden.dtype) @ part.to(dhidden.dtype)
        dweight[first : first + part.shape[0]] = dlogits.t() @ hidden
    return dhidden.to(hidden.dtype), dweight


def _dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _logits(hidden: torch.Tensor, part: torch.Tensor, scale: float) -> torch.Tensor:
    return (hidden @ part.t()).to(_dtype(hidden)) * scale
