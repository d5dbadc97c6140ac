"""Drawing in plain torch: the distribution is cut where the rules say, and the largest of logits plus noise is taken."""

from __future__ import annotations

import math

import torch

from areno_fn.contracts.key import Key
from areno_fn.kernels.token_logp import token_logp
from areno_fn.random import gumbel


def forward(
    logits: torch.Tensor,
    seed: torch.Tensor,
    counter: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens int64 [B], log-probabilities float32 [B], and how many tokens each was drawn among, int64 [B]."""
    size = logits.shape[-1]
    kept = torch.full_like(ids, size)
    if temperature not in (0, 1):
        logits = wide(logits) / temperature
    if temperature > 0 and (0 < top_k < size or top_p < 1 or min_p > 0):
        logits = wide(logits)
        ordered = logits.topk(min(top_k or size, size), dim=-1).values
        kept = count_kept(ordered, top_p, min_p)
        logits = logits.masked_fill(~first_kept(logits, ordered, kept), -math.inf)
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        key, lanes = Key(seed=seed, counter=counter), torch.arange(size, device=logits.device)
        tokens = (logits + gumbel(key, ids[:, None], positions[:, None], lanes)).argmax(-1)
    return tokens, token_logp(logits, tokens)[0].float(), kept


def count_kept(ordered: torch.Tensor, top_p: float, min_p: float) -> torch.Tensor:
    """How many of the logits, in descending order and cut to top-k, the other rules keep: at least 1."""
    stays = torch.ones_like(ordered, dtype=torch.bool)
    if top_p < 1:
        stays[..., 1:] &= ordered.softmax(-1).cumsum(-1)[..., :-1] < top_p
    if min_p > 0:
        stays &= ~(ordered < ordered[..., :1] + math.log(min_p))
    return stays.sum(-1)


def first_kept(logits: torch.Tensor, ordered: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Which logits are the first `count` in descending order, bool [..., V].

    Written so that NaN is always among them: a broken row must not come out finite.
    """
    count = count.unsqueeze(-1)
    last = ordered.gather(-1, count - 1)
    above, tied = ~(logits <= last), logits == last
    return above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= count - above.sum(-1, keepdim=True)))


def wide(logits: torch.Tensor) -> torch.Tensor:
    """At least float32."""
    return logits if logits.dtype == torch.float64 else logits.float()
