"""Drawing in plain torch: the distribution is cut where the rules say, and the largest of logits plus noise is taken.

Where nothing is cut off this is done twice: first with the masses of blocks of tokens, then inside the block.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from areno_fn.contracts.key import Key
from areno_fn.kernels.token_logp import token_logp
from areno_fn.random import gumbel

BLOCK = 256
"""Tokens of a block."""


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
    cut = temperature > 0 and (0 < top_k < size or top_p < 1 or min_p > 0)
    if cut:
        logits = wide(logits)
        ordered = logits.topk(min(top_k or size, size), dim=-1).values
        kept = count_kept(ordered, top_p, min_p)
        logits = logits.masked_fill(~first_kept(logits, ordered, kept), -math.inf)
    key, lanes = Key(seed=seed, counter=counter), torch.arange(size, device=logits.device)
    if temperature == 0:
        tokens = logits.argmax(-1)
    elif cut or size <= BLOCK:
        tokens = (logits + gumbel(key, ids[:, None], positions[:, None], lanes)).argmax(-1)
    else:
        tokens = _by_blocks(logits, key, ids[:, None], positions[:, None])
    return tokens, token_logp(logits, tokens)[0].float(), kept


def _by_blocks(logits: torch.Tensor, key: Key, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Tokens int64 [B]: of a block by its mass, with noise at lane -1 - block, and then by their own."""
    blocks = -(-logits.shape[-1] // BLOCK)
    padded = F.pad(wide(logits), (0, blocks * BLOCK - logits.shape[-1]), value=-math.inf).unflatten(-1, (blocks, BLOCK))
    lanes = torch.arange(max(blocks, BLOCK), device=logits.device)
    masses = padded.logsumexp(-1) + gumbel(key, ids, positions, -1 - lanes[:blocks])
    block = masses.argmax(-1, keepdim=True)
    inside = padded.gather(1, block[..., None].expand(-1, 1, BLOCK)).squeeze(1)
    numbers = block * BLOCK + lanes[:BLOCK]
    return numbers.gather(1, (inside + gumbel(key, ids, positions, numbers)).argmax(-1, keepdim=True)).squeeze(1)


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
