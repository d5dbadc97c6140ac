"""`sample`: one token a row, drawn from a distribution that temperature, top-k, top-p and min-p make of logits."""

from __future__ import annotations

import math

import torch

from areno_fn.contracts.key import Key
from areno_fn.kernels.backend import implementation, require
from areno_fn.kernels.sample import reference

__all__ = ["sample"]


def sample(
    logits: torch.Tensor,
    key: Key,
    ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest of the remaining logits plus Gumbel noise at (key, id, position, lane); a token's lane is its number.

    Where no rule cuts anything off and there are more than 256 tokens this happens twice: with the log-masses of blocks
    of 256 tokens, whose lanes are -1, -2 and so on, and with the tokens of the block that this gives. The
    distribution is the same, and noise is needed for a few hundred lanes instead of all.

    The logits are divided by the temperature; then each rule is applied to what the one before has left: the `top_k`
    largest (0: all); the smallest set of the likeliest with mass `top_p`; those with at least `min_p` times the
    probability of the likeliest. Where tied tokens do not all fit, those with smaller numbers stay. At temperature 0 the
    likeliest token is taken, the smallest among equals, with its log-probability at temperature 1 and nothing cut off.
    The noise is that of `areno_fn.random.gumbel`. There is no gradient and no synchronisation.

    A row that holds NaN has a log-probability of NaN, and one that is -inf throughout one of -inf; either has a token of the
    vocabulary, drawn among at least one.

    Args:
        logits: [B, V], any floating dtype.
        key: the random stream, on the device of the logits.
        ids: int64 [B].
        positions: int64 [B].
        temperature: 0, or the divisor; finite.
        top_k: at least 0.
        top_p, min_p: in [0, 1].

    Returns:
        Tokens int64 [B]; log-probabilities float32 [B] under the distribution that was drawn from; and how many tokens
        each was drawn among, int64 [B].

    Raises:
        KernelError: shapes or dtypes do not fit, V is 0, a rule is out of range, or there is no kernel for the device.

    Sources: Gumbel, "Statistical theory of extreme values", 1954; Holtzman et al., arXiv 1904.09751 (top-p);
        Nguyen et al., arXiv 2407.01082 (min-p).
    """
    fits = logits.ndim == 2 and logits.shape[1] > 0 and logits.is_floating_point()
    fits = fits and ids.shape == positions.shape == logits.shape[:1] and ids.dtype == positions.dtype == torch.int64
    wanted = "logits must be floating [B, V] with V > 0, and ids and positions int64 [B]"
    require(fits, "sample", wanted, logits, ids, positions)
    drawn = 0 <= temperature < math.inf and top_k >= 0 and 0 <= top_p <= 1 and 0 <= min_p <= 1
    rules = f"temperature {temperature}, top_k {top_k}, top_p {top_p}, min_p {min_p}"
    require(drawn, "sample", f"{rules}: the first two must be finite and not negative, the others in [0, 1]", logits)
    tokens, logp, kept = _sample(logits, key.seed, key.counter, ids, positions, temperature, top_k, top_p, min_p)
    return tokens, logp, kept


_sample = implementation(
    "sample",
    "forward",
    "(Tensor logits, Tensor seed, Tensor counter, Tensor ids, Tensor positions, float temperature, int top_k, "
    "float top_p, float min_p) -> (Tensor, Tensor, Tensor)",
    reference.forward,
    lambda logits, seed, counter, ids, *rules: (
        torch.empty_like(ids),
        torch.empty_like(ids, dtype=torch.float32),
        torch.empty_like(ids),
    ),
)
