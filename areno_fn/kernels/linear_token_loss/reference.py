"""Log-probabilities of a linear head and their gradients in plain torch, some rows at a time; float32 sums."""

from __future__ import annotations

import torch

from areno_fn.kernels.linear_token_loss.scored import Linear, Scored, Slope, both, pulled
from areno_fn.kernels.token_logp import reference as token_logp


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    slope: Slope,
    scale: float,
    scored: Scored | None,
    linear: Linear | None,
    rows: int,
    into_weight: bool,
    entropic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A 0, logp and entropy [M], and the gradients [M, D] and [V, D] (empty where not wanted)."""
    del entropic  # the slopes say so
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logp, entropy = (torch.empty(targets.shape, dtype=dtype) for _ in range(2))
    dhidden = torch.empty(hidden.shape, dtype=hidden.dtype)
    total = torch.zeros(weight.shape if into_weight else (0, weight.shape[1]), dtype=dtype)
    for first in range(0, targets.shape[0], rows):
        here = slice(first, first + rows)
        logits = hidden[here] @ weight.t() if linear is None else linear(hidden[here], weight)
        if scored is None:
            logits = logits.to(dtype) * scale
            logp[here], entropy[here], peak, log_sum = token_logp.forward(logits, targets[here])
            dlogp, dentropy = both(slope(first, logp[here], entropy[here]))
            dentropy = None if dentropy is None else dentropy.to(dtype) * scale
            dlogits = token_logp.backward(
                dlogp.to(dtype) * scale, dentropy, logits, targets[here], entropy[here], peak, log_sum
            )
        else:
            logp[here], entropy[here], dlogits = pulled(scored, slope, first, logits)
            dlogits = dlogits.to(dtype)
        dhidden[here] = (dlogits @ weight.to(dtype)).to(hidden.dtype)
        if into_weight:
            total += dlogits.t() @ hidden[here].to(dtype)
    return torch.zeros((), dtype=dtype), logp, entropy, dhidden, total
