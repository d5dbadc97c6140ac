"""The sampling distribution: one function that the rollout draws from and that training scores under.

Both sides call `log_probs` (the rollout through `draw`) with the same `Sampling`, so that the recorded and
the recomputed log-probability are one quantity: that of a token under the distribution it was drawn from.
"""

from __future__ import annotations

import math

import torch

from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Sampling
from areno_fn.kernels.token_logp import token_logp
from areno_fn.random import gumbel

MAX_LOGITS = 2**26
"""Most logits (rows times vocabulary) that scoring and drawing hold at once; 256 MiB in float32."""


def truncate(logits: torch.Tensor, sampling: Sampling, keep: torch.Tensor | None = None) -> torch.Tensor:
    """The logits of the sampling distribution: divided by the temperature, -inf where nothing is drawn from.

    Applied in this order, each to what the one before has left:

    * temperature: logits / T. At T = 0 the choice is greedy and has no distribution of its own; its
      log-probabilities are those at T = 1, untruncated.
    * top-k: the k largest (0, or k >= V: all).
    * top-p: the smallest set with mass at least p: a token stays when the mass before it is below p
      ("The Curious Case of Neural Text Degeneration", arXiv 1904.09751). p = 1 keeps all and sorts nothing.
    * min-p: tokens with at least min_p times the probability of the likeliest (arXiv 2407.01082).

    The likeliest token always stays. Where tied tokens do not all fit, those with smaller numbers stay.

    Args:
        logits: [..., V], any floating dtype.
        sampling: the distribution.
        keep: int64 [...], tokens that stay in any case. Scoring passes its targets: once parameters have
            moved, a token drawn earlier may fall out of the kept set, and its log-probability must stay
            finite. It then counts as a member of the set. While parameters have not moved it is one anyway.

    Returns:
        [..., V], the logits themselves where there is nothing to do, float32 (float64 for float64)
        otherwise. The gradient passes to the kept logits.
    """
    if sampling.temperature == 0:
        return logits
    if sampling.temperature != 1:
        logits = _wide(logits) / sampling.temperature
    if sampling.min_p == 0 and not _ranks(sampling, logits.shape[-1]):
        return logits
    logits = _wide(logits)
    kept = _kept(logits.detach(), sampling)
    if keep is not None:
        kept = kept.scatter(-1, keep.unsqueeze(-1), True)
    return logits.masked_fill(~kept, -math.inf)


def log_probs(logits: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of given tokens under the sampling distribution, and its entropy.

    Args:
        logits: [M, V].
        targets: int64 [M].
        sampling: the distribution.

    Returns:
        logp float32 [M], which carries the gradient, and entropy float32 [M], which carries none.
    """
    logp, entropy = token_logp(truncate(logits, sampling, keep=targets), targets)
    return logp, entropy


def draw(
    logits: torch.Tensor, sampling: Sampling, key: Key, ids: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token a row, as a function of (key, id, position) and the row's logits alone.

    The draw is the argmax of the truncated logits plus Gumbel noise at (id, position, token); rows do not
    see each other, so that neither batch size nor order matters. Temperature 0 takes the likeliest token
    (the smallest number among equals) and uses no randomness.

    Args:
        logits: [B, V].
        sampling: the distribution.
        key: the random stream.
        ids: int64 [B], the name of each sequence.
        positions: int64 [B], the place of the drawn token in its sequence.

    Returns:
        tokens int64 [B], and their log-probabilities float32 [B] as `log_probs` gives them.
    """
    rows = max(1, MAX_LOGITS // logits.shape[-1])
    parts = zip(*(torch.split(x, rows) for x in (logits, ids, positions)), strict=True)
    tokens, logp = zip(*(_draw(*part, sampling=sampling, key=key) for part in parts), strict=True)
    return torch.cat(tokens), torch.cat(logp)


def _draw(
    logits: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, *, sampling: Sampling, key: Key
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = truncate(logits, sampling)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        lanes = torch.arange(logits.shape[-1], device=logits.device)
        tokens = (logits + gumbel(key, ids[:, None], positions[:, None], lanes)).argmax(-1)
    return tokens, token_logp(logits, tokens)[0]


def _ranks(sampling: Sampling, size: int) -> bool:
    return 0 < sampling.top_k < size or sampling.top_p < 1


def _kept(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Which tokens stay, bool [..., V].

    Comparisons here and below are written so that NaN stays: a broken row must not come out finite.
    """
    kept = (
        _leading(logits, sampling) if _ranks(sampling, logits.shape[-1]) else torch.ones_like(logits, dtype=torch.bool)
    )
    if sampling.min_p > 0:
        kept = kept & ~(logits < logits.amax(-1, keepdim=True) + math.log(sampling.min_p))
    return kept


def _leading(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Top-k, then top-p among what it left: in descending order, each keeps a prefix."""
    size = logits.shape[-1]
    limit = min(sampling.top_k, size) if sampling.top_k else size
    ordered = logits.topk(limit, dim=-1).values
    count = torch.full_like(ordered[..., :1], limit, dtype=torch.int64)
    if sampling.top_p < 1:
        mass_before = ordered.softmax(-1).cumsum(-1)[..., :-1]
        count = 1 + (mass_before < sampling.top_p).sum(-1, keepdim=True)
    last = ordered.gather(-1, count - 1)
    above, tied = ~(logits <= last), logits == last
    return above | (tied & (tied.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
