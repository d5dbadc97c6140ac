"""What all structs of a run specification are made of."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(ge=0)]
Unit = Annotated[float, Meta(ge=0, le=1)]
Consistency = Literal["ordinary", "bitwise"]
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]+$")]


class Spec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all specification structs."""
