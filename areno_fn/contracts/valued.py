"""`Valued`: a model whose output is one number a token, as a critic or a reward model is."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.record import record, shown


@record
class Valued:
    """Parameters of a model that gives every token one number: `head` times the final hidden state.

    Attributes:
        trunk: what `TokenPolicy.hidden` takes; it has no output matrix.
        head: [1, D].
    """

    trunk: Any
    head: torch.Tensor

    def __check__(self) -> None:
        if self.head.ndim != 2 or self.head.shape[0] != 1:
            raise RecordError(f"Valued.head must be [1, D], received {shown(self.head)}")
