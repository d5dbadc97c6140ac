"""From hidden states to log-probabilities without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any, Protocol, runtime_checkable

import torch
import torch.utils._pytree as pytree

from areno_fn.autodiff import custom_vjp
from areno_fn.contracts.policy import TokenPolicy, is_bitwise
from areno_fn.contracts.spec import Sampling
from areno_fn.kernels.linear_token_logp import linear_token_logp
from areno_fn.steps.token.sampling import MAX_LOGITS, cuts, log_probs

_Pair = tuple[torch.Tensor, torch.Tensor]


@runtime_checkable
class LinearHead(Protocol):
    """A policy whose logits are a linear map of its hidden states."""

    def head(self, params: Any) -> Any:
        """The matrix [V, D] of which `logits(params, hidden)` is `hidden matrix^T`; it may be adapted."""
        ...


def decision_log_probs(
    policy: TokenPolicy,
    sampling: Sampling,
    params: Any,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    kept: torch.Tensor | None = None,
    *,
    entropic: bool = False,
    max_logits: int = MAX_LOGITS,
) -> _Pair:
    """Log-probabilities and entropies of decisions, given the hidden states they were made in.

    When the logits of all decisions would be more than `max_logits` numbers, they are made some rows at a
    time, thrown away, and made again in the backward pass; rows do not see each other, so the values and
    gradients are those of the whole up to rounding. On the GPU, a `LinearHead` under a distribution that cuts nothing
    off is taken through `linear_token_logp` instead, which makes them for a part of the vocabulary at a time.

    Args:
        policy: the model; only its `logits` is called.
        sampling: the distribution.
        params: its parameters.
        hidden: [M, D].
        targets: int64 [M].
        kept: int64 [M], how many tokens each target was drawn among; see `sampling.truncate`.
        entropic: the entropy carries a gradient.
        max_logits: most logits held at once.

    Returns:
        logp float32 [M], which carries the gradient, and entropy float32 [M], which carries none unless it is asked for.
    """
    whole = is_bitwise(policy)  # rows of logits as a rollout has them, never parts of the vocabulary
    rows = max(1, max_logits // policy.vocab_size)
    if targets.shape[0] <= rows:
        return log_probs(policy.logits(params, hidden), targets, sampling, kept, entropic=entropic)
    matrix = policy.head(params) if isinstance(policy, LinearHead) and not whole else None
    if isinstance(matrix, torch.Tensor) and in_parts(hidden, matrix) and not cuts(sampling, policy.vocab_size):
        return linear_token_logp(hidden, matrix, targets, 1 / (sampling.temperature or 1.0), entropic=entropic)
    leaves, structure = pytree.tree_flatten(params)
    moving = [i for i, x in enumerate(leaves) if _may_move(x)]

    def head(h: torch.Tensor, t: torch.Tensor, n: torch.Tensor | None, values: list[Any]) -> _Pair:
        full = list(leaves)
        for i, value in zip(moving, values, strict=True):
            full[i] = value
        return log_probs(policy.logits(pytree.tree_unflatten(full, structure), h), t, sampling, n, entropic=entropic)

    by_chunks = _by_chunks_of_both if entropic else _by_chunks
    logp, entropy = by_chunks(head, rows, hidden, targets, kept, *(leaves[i] for i in moving))
    return logp, entropy


def in_parts(hidden: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether the vocabulary is cut in parts. On the CPU it is not, so that a row keeps the bits it had in a rollout."""
    return hidden.is_cuda and hidden.dtype == matrix.dtype and not torch.compiler.is_compiling()


def _may_move(leaf: Any) -> bool:
    """Whether a leaf may need a gradient. One that is frozen needs none, and a head is too large to make one in vain.

    Under `torch.compile` the arguments of torch.func.vjp are not marked, so there any leaf may.
    """
    return torch.compiler.is_compiling() or (isinstance(leaf, torch.Tensor) and leaf.requires_grad)


def _split(rows: int, *values: torch.Tensor | None) -> list[tuple[Any, ...]]:
    """The same rows of each, chunk by chunk; None stays None."""
    chunks = [repeat(None) if x is None else torch.split(x, rows) for x in values]
    return list(zip(*chunks, strict=False))


def _forward(
    head: Callable[..., _Pair],
    rows: int,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    kept: torch.Tensor | None,
    *leaves: Any,
) -> _Pair:
    pairs = [head(h, t, n, list(leaves)) for h, t, n in _split(rows, hidden, targets, kept)]
    return torch.cat([logp for logp, _ in pairs]), torch.cat([entropy for _, entropy in pairs])


def _backward(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Makes the logits again, chunk by chunk."""
    del outputs
    head, rows, hidden, targets, kept, *leaves = inputs
    moving = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    sums: dict[int, torch.Tensor] = {}
    into_hidden = []
    for h, t, n, *slopes in _split(rows, hidden, targets, kept, *cotangents):
        dh, *pulled = _pull_chunk(head, h, t, n, slopes, leaves, moving)
        into_hidden.append(dh)
        for i, g in zip(moving, pulled, strict=True):
            if g is not None:  # summed in float32, as one product over all rows would be
                sums[i] = sums[i].add_(g) if i in sums else g.to(torch.promote_types(g.dtype, torch.float32), copy=True)
    into_leaves = [sums[i].to(x.dtype) if i in sums else _zeros(x) for i, x in enumerate(leaves)]
    return None, None, torch.cat(into_hidden), None, None, *into_leaves


def _pull_chunk(
    head: Callable[..., _Pair],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    kept: torch.Tensor | None,
    slopes: list[torch.Tensor],
    leaves: list[Any],
    moving: list[int],
) -> tuple[torch.Tensor, ...]:
    """Cotangents of a chunk's hidden states and of the moving leaves, None for leaves that the head does not read.

    Plain autograd, because it tells those from leaves whose gradient is 0. Most leaves of a model are not
    read here, and zeros for them in every chunk would cost a second model. Under `torch.compile` only
    torch.func can be traced, and they are zeros.
    """

    def scored(h: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        full = list(leaves)
        for i, value in zip(moving, values, strict=True):
            full[i] = value
        return head(h, targets, kept, full)[: len(slopes)]

    at = (hidden, *(leaves[i] for i in moving))
    if torch.compiler.is_compiling():
        pulled: tuple[torch.Tensor, ...] = torch.func.vjp(scored, *at)[1](tuple(slopes))
        return pulled
    with torch.enable_grad():
        at = tuple(x.detach().requires_grad_() for x in at)
        return torch.autograd.grad(scored(*at), at, slopes, allow_unused=True)


def _zeros(leaf: Any) -> torch.Tensor | None:
    """Zeros that take no memory."""
    return leaf.new_zeros(()).expand_as(leaf) if isinstance(leaf, torch.Tensor) else None


def _backward_of_logp(
    cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    return _backward(cotangents[:1], inputs, outputs)


_by_chunks = custom_vjp(_forward, _backward_of_logp, constant_outputs=(1,), keep_outputs=False)
_by_chunks_of_both = custom_vjp(_forward, _backward, keep_outputs=False)
