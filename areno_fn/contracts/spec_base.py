"""What all structs of a run specification are made of.

Every number has a largest value, from which on no run could work or nothing changes any more: it would not fit into memory,
never end, or leave the range of 32 bits. What memory holds is bounded for all machines alike, since a specification may be
checked on another one than it runs on.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Natural = Annotated[int, Meta(ge=0, le=1_000_000_000)]
"""Steps, rows of a file, and other places in what is passed one by one."""
Positive = Annotated[int, Meta(ge=1, le=1_000_000_000)]
"""The same from 1, and most of what is taken at once, where a large number means all."""
Rows = Annotated[int, Meta(ge=1, le=1_048_576)]
"""What one step holds in memory."""
Samples = Annotated[int, Meta(ge=1, le=65_536)]
"""Of one prompt."""
Tokens = Annotated[int, Meta(ge=1, le=16_777_216)]
"""Of one sequence."""
Turns = Annotated[int, Meta(ge=1, le=1_000)]
"""How often one step goes over what it holds."""
Rate = Annotated[float, Meta(ge=0)]
"""A threshold, of which any that is large enough means none."""
Coefficient = Annotated[float, Meta(ge=0, le=1_000_000)]
"""What a term of a loss or a reward is multiplied by."""
Scale = Annotated[float, Meta(gt=0, le=1_000_000)]
"""The same where it cannot be left out."""
Weight = Annotated[float, Meta(ge=-1_000_000, le=1_000_000)]
"""What a reward is multiplied by, or less by."""
Seconds = Annotated[float, Meta(ge=0, le=604_800)]
"""Up to a week."""
Unit = Annotated[float, Meta(ge=0, le=1)]
Consistency = Literal["ordinary", "bitwise"]
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]+$")]
Place = Annotated[str, Meta(min_length=1)]
"""A file or folder; the empty path would be the current folder."""


class Spec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all specification structs."""
