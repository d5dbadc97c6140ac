"""Log-probability of chosen tokens and entropy in plain torch, float32 inside (float64 for float64)."""

from __future__ import annotations

import torch


def forward(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logp, entropy, and what the backward needs: the largest logit m and log(sum(exp(logit - m))), all [M].

    Keeping m and the logarithm apart costs no accuracy when logits are large; their sum would.
    """
    wide = _wide(logits)
    # an all -inf row: a finite m makes every exp(-inf - m) an honest 0, and log_sum 0 makes logp -inf
    peak = wide.amax(-1, keepdim=True).clamp_min(torch.finfo(wide.dtype).min)
    shifted = wide - peak
    weight = shifted.exp()
    total = weight.sum(-1, keepdim=True)
    log_sum = torch.where(total == 0, 0.0, total.log())
    chosen = shifted.gather(-1, targets.unsqueeze(-1)) - log_sum
    # H = log(sum) + sum(e (m - l)) / sum; the smallest finite number stands for -inf, whose weight is 0
    distance = weight.mul_(shifted.clamp_min_(torch.finfo(wide.dtype).min)).sum(-1, keepdim=True)
    entropy = torch.where(total == 0, 0.0, log_sum - distance / total)
    return chosen.squeeze(-1), entropy.squeeze(-1), peak.squeeze(-1), log_sum.squeeze(-1)


def backward(
    dlogp: torch.Tensor,
    dentropy: torch.Tensor | None,
    logits: torch.Tensor,
    targets: torch.Tensor,
    entropy: torch.Tensor,
    peak: torch.Tensor,
    log_sum: torch.Tensor,
) -> torch.Tensor:
    """The cotangent of the logits, [M, V]: dlogp (1[j = target] - p_j) - dentropy p_j (log p_j + H), 0 where a logit is -inf."""
    wide = _wide(logits)
    every = (wide - peak.unsqueeze(-1)).sub_(log_sum.unsqueeze(-1))
    if dentropy is None:
        dlogits = every.exp_().mul_(-dlogp.unsqueeze(-1))
    else:  # the smallest finite number stands for -inf, whose weight is 0
        probability = every.exp()
        dlogits = probability * -dlogp.unsqueeze(-1)
        bend = every.clamp_min_(torch.finfo(wide.dtype).min).add_(entropy.unsqueeze(-1)).mul_(probability)
        dlogits -= bend.mul_(dentropy.unsqueeze(-1))
    chosen = targets.unsqueeze(-1)
    possible = wide.gather(-1, chosen) > -torch.inf  # elsewhere p is 0 already
    dlogits.scatter_add_(-1, chosen, torch.where(possible, dlogp.unsqueeze(-1), 0.0))
    return dlogits.to(logits.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
