"""What a loss says of some rows: its slopes, and log-probabilities under another distribution."""

from __future__ import annotations

from collections.abc import Callable

import torch

Slope = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(first, logp, entropy) -> ` the derivative of the loss in each of these log-probabilities, the rows from `first` on."""

Scored = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""`(first, logits) -> (logp, entropy)` of the rows from `first` on, of which logp is differentiable in the logits."""


Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(hidden [R, D], weight [V, D]) -> logits [R, V]`."""


def pulled(scored: Scored, slope: Slope, first: int, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Log-probabilities, entropies, and the gradient of the loss in some rows of logits."""
    with torch.enable_grad():
        given = logits.detach().requires_grad_()
        logp, entropy = scored(first, given)
        (dlogits,) = torch.autograd.grad(logp, given, slope(first, logp.detach(), entropy).to(logp.dtype))
    return logp.detach(), entropy, dlogits
