"""Conditions that are left out at random, so that a model learns what guidance leads away from."""

from __future__ import annotations

import torch

from areno_fn import random, tree
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.key import Key


def dropped(conditions: Conditions, key: Key, ids: torch.Tensor, share: float = 0.1) -> Conditions:
    """Conditions with the negative one in the place of the positive one for a share of the rows.

    Which rows is a function of (key, id).

    Args:
        conditions: B of them, the negative ones given.
        key: the random stream.
        ids: int64 [B].
        share: the probability.

    Raises:
        SpecError: the share is no probability.
        RecordError: there are no negative conditions.
    """
    if not 0 <= share <= 1:
        raise SpecError(f"a share of conditions to drop must be between 0 and 1, received {share}")
    if conditions.negative is None:
        raise RecordError("dropping conditions needs Conditions.negative, but there are none")
    gone = random.uniform(key, ids) < share

    def chosen(positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        return torch.where(gone.reshape(-1, *[1] * (positive.ndim - 1)), negative, positive)

    return Conditions(positive=tree.map(chosen, conditions.positive, conditions.negative), negative=conditions.negative)
