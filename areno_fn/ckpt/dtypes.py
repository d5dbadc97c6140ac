"""What a conversion makes of a dtype. A conversion is asked for; it is never part of a layout."""

from __future__ import annotations

from typing import Literal

import torch

DtypePolicy = Literal["source", "float32", "bfloat16"]
"""What floating tensors become: "source" keeps each one's own dtype."""


def converted(dtype: torch.dtype, policy: DtypePolicy) -> torch.dtype:
    """What a policy makes of a dtype; only floating ones change."""
    chosen = {"source": dtype, "float32": torch.float32, "bfloat16": torch.bfloat16}[policy]
    return chosen if dtype.is_floating_point else dtype
