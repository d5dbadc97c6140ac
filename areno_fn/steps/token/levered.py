"""Scoring and a loss in one: gradients of a linear head are made with the log-probabilities, where the loss allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from areno_fn.contracts.actions import Sums
from areno_fn.contracts.policy import TokenPolicy, is_bitwise
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import Sampling
from areno_fn.kernels.consistency import primitives
from areno_fn.kernels.linear_token_loss import CHUNK, linear_token_loss
from areno_fn.steps.token import head
from areno_fn.steps.token.sampling import MAX_LOGITS, cuts, log_probs

Record = TypeVar("Record")


def levered(
    policy: TokenPolicy,
    sampling: Sampling,
    params: Any,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    kept: torch.Tensor | None,
    made: Callable[[torch.Tensor, torch.Tensor], Record],
    loss: Callable[[Record], Sums],
    *,
    entropic: bool = False,
    max_logits: int = MAX_LOGITS,
) -> Sums:
    """`loss(made(logp, entropy))` of the decisions made in some hidden states, with its gradient.

    The loss is a sum of functions of one decision each (`areno_fn.steps.objectives.separable`). So on the GPU, where
    `decision_log_probs` would make logits twice, once for each pass, they are made once: with the log-probabilities of
    some rows comes the slope of the loss in them, and with it the gradient. Other rows stand at 0 for that time, which
    changes no slope. The logits of a truncated distribution are made once as well.

    Args:
        policy, sampling, params, hidden, targets, kept, max_logits: as for `decision_log_probs`.
        made: from log-probabilities and entropies, float32 [M], to what the loss takes.
        loss: the loss.
        entropic: it has a gradient in the entropies.
    """
    matrix = _matrix(policy, params, hidden, targets, max_logits)
    if matrix is None:
        found = head.decision_log_probs(
            policy, sampling, params, hidden, targets, kept, entropic=entropic, max_logits=max_logits
        )
        return loss(made(*found))
    dtype = torch.promote_types(hidden.dtype, torch.float32)

    def slope(first: int, logp: torch.Tensor, entropy: torch.Tensor) -> Any:
        here = slice(first, first + logp.shape[0])
        every, entropies = (torch.zeros(targets.shape, dtype=dtype, device=targets.device) for _ in range(2))
        every[here], entropies[here] = logp, entropy
        with torch.enable_grad():
            total = loss(made(every.requires_grad_(), entropies.requires_grad_(entropic))).total
            asked = (every, entropies) if entropic else (every,)
            slopes = [x[here] for x in torch.autograd.grad(total, asked, materialize_grads=True)]
        return tuple(slopes) if entropic else slopes[0]

    def scored(first: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        here = slice(first, first + logits.shape[0])
        return log_probs(logits, targets[here], sampling, None if kept is None else kept[here], entropic=entropic)

    how: dict[str, Any] = {"entropic": entropic}
    if is_bitwise(policy):  # rows of logits as a rollout has them
        linear = primitives("bitwise").linear
        chunk = max_logits if cuts(sampling, policy.vocab_size) else max(CHUNK // 2, max_logits)
        how |= {"scored": scored, "linear": linear, "chunk": chunk}
    elif cuts(sampling, policy.vocab_size):
        how |= {"scored": scored, "chunk": max_logits}
    else:
        how |= {"scale": 1 / (sampling.temperature or 1.0)}
    lever, logp, entropy = linear_token_loss(hidden, matrix, targets, slope, **how)
    sums = loss(made(logp, entropy))
    return replace(sums, total=sums.total + lever)


def _matrix(
    policy: TokenPolicy, params: Any, hidden: torch.Tensor, targets: torch.Tensor, max_logits: int
) -> torch.Tensor | None:
    """The head, where logits with a gradient are too many to be kept, and are one product."""
    few = targets.shape[0] <= max(1, max_logits // policy.vocab_size)
    if few or not isinstance(policy, head.LinearHead):
        return None
    matrix = policy.head(params)
    if not isinstance(matrix, torch.Tensor) or not head.in_parts(hidden, matrix):
        return None
    return matrix if torch.is_grad_enabled() and (hidden.requires_grad or matrix.requires_grad) else None
