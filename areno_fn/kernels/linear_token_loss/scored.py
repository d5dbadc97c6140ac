"""What a loss says of some rows: its slopes, and log-probabilities under another distribution."""

from __future__ import annotations

from collections.abc import Callable

import torch

Slope = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
"""`(first, logp, entropy) -> ` the derivative of the loss in each of these log-probabilities, the rows from `first` on.

Of a loss of entropies a pair: that, and the derivative in each of these entropies.
"""

Scored = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""`(first, logits) -> (logp, entropy)` of the rows from `first` on, of which logp is differentiable in the logits.

For a loss of entropies both are.
"""

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(hidden [R, D], weight [V, D]) -> logits [R, V]`."""


def pulled(scored: Scored, slope: Slope, first: int, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Log-probabilities, entropies, and the gradient of the loss in some rows of logits."""
    with torch.enable_grad():
        given = logits.detach().requires_grad_()
        logp, entropy = scored(first, given)
        slopes = both(slope(first, logp.detach(), entropy.detach()))
        answered = [(x, d.to(x.dtype)) for x, d in zip((logp, entropy), slopes, strict=True) if d is not None]
        (dlogits,) = torch.autograd.grad([x for x, _ in answered], given, [d for _, d in answered])
    return logp.detach(), entropy.detach(), dlogits


def both(slopes: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The derivative in log-probabilities, and that in entropies, where there is one."""
    return slopes if isinstance(slopes, tuple) else (slopes, None)
