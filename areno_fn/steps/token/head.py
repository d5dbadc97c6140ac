"""From hidden states to log-probabilities without ever holding all logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree

from areno_fn.autodiff import custom_vjp
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.token.sampling import MAX_LOGITS, log_probs


def decision_log_probs(
    policy: TokenPolicy,
    sampling: Sampling,
    params: Any,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    kept: torch.Tensor | None = None,
    *,
    max_logits: int = MAX_LOGITS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of decisions, given the hidden states they were made in.

    When the logits of all decisions would be more than `max_logits` numbers, they are made some rows at a
    time, thrown away, and made again in the backward pass; rows do not see each other, so the values and
    gradients are those of the whole up to rounding.

    Args:
        policy: the model; only its `logits` is called.
        sampling: the distribution.
        params: its parameters.
        hidden: [M, D].
        targets: int64 [M].
        kept: int64 [M], how many tokens each target was drawn among; see `sampling.truncate`.
        max_logits: most logits held at once.

    Returns:
        logp float32 [M], which carries the gradient, and entropy float32 [M], which carries none.
    """
    rows = max(1, max_logits // policy.vocab_size)
    if targets.shape[0] <= rows:
        return log_probs(policy.logits(params, hidden), targets, sampling, kept)
    leaves, structure = pytree.tree_flatten(params)
    logp, entropy = _by_chunks(_Head(policy, sampling, structure, rows), hidden, targets, kept, *leaves)
    return logp, entropy


@attrs.frozen
class _Head:
    policy: TokenPolicy
    sampling: Sampling
    structure: pytree.TreeSpec
    rows: int

    def __call__(
        self, hidden: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor | None, leaves: Sequence[Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        params = pytree.tree_unflatten(list(leaves), self.structure)
        return log_probs(self.policy.logits(params, hidden), targets, self.sampling, kept)

    def split(self, *of_rows: torch.Tensor | None) -> Iterator[tuple[Any, ...]]:
        """The same rows of each, chunk by chunk; None stays None."""
        chunks = [repeat(None) if x is None else torch.split(x, self.rows) for x in of_rows]
        return zip(*chunks, strict=False)


def _forward(
    head: _Head, hidden: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor | None, *leaves: Any
) -> tuple[torch.Tensor, ...]:
    parts = head.split(hidden, targets, kept)
    logp, entropy = zip(*(head(h, t, n, leaves) for h, t, n in parts), strict=True)
    return torch.cat(logp), torch.cat(entropy)


def _backward(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Makes the logits again, chunk by chunk.

    Plain autograd, because it tells a leaf that the head does not read from one whose gradient is 0. Most
    leaves of a model are of the first kind; zeros for them in every chunk would cost a second model.
    """
    del outputs
    head, hidden, targets, kept, *leaves = inputs
    moving = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    sums: dict[int, torch.Tensor] = {}
    into_hidden = []
    for h, t, n, dlogp in head.split(hidden, targets, kept, cotangents[0]):
        dh, *pulled = _pull_chunk(head, h, t, n, dlogp, leaves, moving)
        into_hidden.append(dh)
        for i, g in zip(moving, pulled, strict=True):
            if g is not None:  # summed in float32, as one product over all rows would be
                sums[i] = sums[i].add_(g) if i in sums else g.to(torch.promote_types(g.dtype, torch.float32), copy=True)
    into_leaves = [sums[i].to(x.dtype) if i in sums else _zeros(x) for i, x in enumerate(leaves)]
    return None, torch.cat(into_hidden), None, None, *into_leaves


def _pull_chunk(
    head: _Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    kept: torch.Tensor | None,
    dlogp: torch.Tensor,
    leaves: Sequence[Any],
    moving: list[int],
) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        hidden = hidden.detach().requires_grad_()
        fresh = list(leaves)
        for i in moving:
            fresh[i] = leaves[i].detach().requires_grad_()
        logp, _ = head(hidden, targets, kept, fresh)
        return torch.autograd.grad(logp, [hidden, *(fresh[i] for i in moving)], dlogp, allow_unused=True)


def _zeros(leaf: Any) -> torch.Tensor | None:
    """Zeros that take no memory."""
    return leaf.new_zeros(()).expand_as(leaf) if isinstance(leaf, torch.Tensor) else None


_by_chunks = custom_vjp(_forward, _backward, constant_outputs=(1,), keep_outputs=False)
