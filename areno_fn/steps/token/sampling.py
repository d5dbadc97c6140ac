"""The sampling distribution: one function that the rollout draws from and that training scores under.

Both sides go through `truncate` with the same `Sampling`, so that the recorded and the recomputed
log-probability are one quantity: that of a token under the distribution it was drawn from.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from areno_fn import tree
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import COLDEST, Sampling
from areno_fn.kernels.sample import sample
from areno_fn.kernels.sample.reference import count_kept, first_kept, wide
from areno_fn.kernels.token_logp import token_logp

MAX_LOGITS = 2**26
"""Most logits (rows times vocabulary) that scoring and drawing hold at once; 256 MiB in float32."""


def check_sampling(sampling: Sampling) -> None:
    """Refuses numbers that no sampling distribution has: a specification is checked when it is read, this one may not be.

    Raises:
        SpecError: names the field and what it may be.
    """
    legal = {
        "max_tokens": (sampling.max_tokens >= 1, "at least 1"),
        "temperature": (
            sampling.temperature == 0 or COLDEST <= sampling.temperature < math.inf,
            f"0 for greedy decoding, or a number from {COLDEST:g} on",
        ),
        "top_k": (sampling.top_k >= 0, "at least 0, which keeps all"),
        "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1"),
        "min_p": (0 <= sampling.min_p < 1, "at least 0 and below 1"),
    }
    for name, (fits, right) in legal.items():
        if not fits:
            raise SpecError(f"Sampling.{name} is {getattr(sampling, name)}, but must be {right}")


class Truncated(NamedTuple):
    """A sampling distribution.

    Attributes:
        logits: [..., V], -inf where nothing is drawn from; float32 (float64 for float64) if anything was done.
        kept: int64 [...], how many tokens stay; None for a `Sampling` that never cuts any off.
    """

    logits: torch.Tensor
    kept: torch.Tensor | None


def truncate(
    logits: torch.Tensor,
    sampling: Sampling,
    keep: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> Truncated:
    """The distribution that `sampling` makes of a model's logits.

    Applied in this order, each to what the one before has left:

    * temperature: logits / T. At T = 0 the choice is greedy and has no distribution of its own; its
      log-probabilities are those at T = 1, untruncated.
    * top-k: the k largest (0, or k >= V: all).
    * top-p: the smallest set with mass at least p: a token stays when the mass before it is below p
      ("The Curious Case of Neural Text Degeneration", arXiv 1904.09751).
    * min-p: tokens with at least min_p times the probability of the likeliest (arXiv 2407.01082).

    The likeliest token always stays. Where tied tokens do not all fit, those with smaller numbers stay. So
    what stays is always the first tokens in descending order, and their number is all that scoring has to
    know of the rules.

    Args:
        logits: [..., V], any floating dtype.
        sampling: the distribution.
        keep: int64 [...], a token of each row that stays in any case, in the place of the last one if it
            would not. Scoring passes its targets: once parameters have moved, a token may fall out of the
            set it was drawn from, and its log-probability must stay finite.
        kept: int64 [...], how many tokens stay; found by the rules when omitted. Scoring passes what the
            rollout recorded: rules such as top-p jump where a sum passes p, so that a rounding error in
            another batch could change the set by a token of any probability. With equally many tokens it
            can only exchange two that are equally likely.

    Returns:
        The logits, to which the gradient passes where they stay, and how many do.
    """
    if sampling.temperature not in (0, 1):
        logits = wide(logits) / sampling.temperature
    if not cuts(sampling, logits.shape[-1]):
        return Truncated(logits, None)
    logits = wide(logits)
    candidates = logits.detach()
    most = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    ordered = None
    if kept is None:
        ordered = candidates.topk(most, dim=-1).values
        kept = count_kept(ordered, sampling.top_p, sampling.min_p)
    if keep is not None:
        candidates, ordered = candidates.scatter(-1, keep.unsqueeze(-1), math.inf), None
    if ordered is None:
        ordered = candidates.topk(most, dim=-1).values
    return Truncated(logits.masked_fill(~first_kept(candidates, ordered, kept), -math.inf), kept)


def cuts(sampling: Sampling, vocab_size: int) -> bool:
    """Whether tokens can be cut off at all."""
    rules = 0 < sampling.top_k < vocab_size or sampling.top_p < 1 or sampling.min_p > 0
    return rules and sampling.temperature > 0


def log_probs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    sampling: Sampling,
    kept: torch.Tensor | None = None,
    *,
    entropic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of given tokens under the sampling distribution, and its entropy.

    Args:
        logits: [M, V].
        targets: int64 [M].
        sampling: the distribution.
        kept: int64 [M], how many tokens each target was drawn among; see `truncate`.
        entropic: the entropy carries a gradient.

    Returns:
        logp float32 [M], which carries the gradient, and entropy float32 [M], which carries none unless it is asked for.
    """
    return token_logp(truncate(logits, sampling, keep=targets, kept=kept).logits, targets, entropic=entropic)


class Drawn(NamedTuple):
    """One token a row.

    Attributes:
        tokens: int64 [B].
        logp: float32 [B], under the distribution the token was drawn from.
        kept: int64 [B], how many tokens it was drawn among; None where nothing is ever cut off.
    """

    tokens: torch.Tensor
    logp: torch.Tensor
    kept: torch.Tensor | None


def draw(
    logits: torch.Tensor,
    sampling: Sampling,
    key: Key,
    ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    rescored: bool = False,
) -> Drawn:
    """Draws one token a row, as a function of (key, id, position) and the row's logits alone.

    The draw is the argmax of the truncated logits plus Gumbel noise at (id, position, token), where nothing is
    cut off from a large vocabulary by blocks of tokens first (`areno_fn.kernels.sample`); rows do not
    see each other, so that neither batch size nor order matters. Temperature 0 takes the likeliest token
    (the smallest number among equals) and uses no randomness.

    Args:
        logits: [B, V].
        sampling: the distribution.
        key: the random stream.
        ids: int64 [B], the name of each sequence.
        positions: int64 [B], the place of the drawn token in its sequence.
        rescored: the log-probabilities are those of `log_probs`, to the bit, instead of what was summed while drawing.
    """
    rows = max(1, MAX_LOGITS // max(1, logits.shape[-1]))
    parts = zip(*(torch.split(x, rows) for x in (logits, ids, positions)), strict=True)
    key = tree.map(lambda x: x.to(logits.device), key)
    drawn = [
        sample(
            part,
            key,
            names,
            places,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        for part, names, places in parts
    ]
    if rescored:
        drawn = [
            (tokens, log_probs(part, tokens, sampling, kept)[0].float(), kept)
            for (tokens, _, kept), part in zip(drawn, torch.split(logits, rows), strict=True)
        ]
    tokens, logp, kept = drawn[0] if len(drawn) == 1 else (torch.cat(x) for x in zip(*drawn, strict=True))
    return Drawn(tokens, logp, kept if cuts(sampling, logits.shape[-1]) else None)
