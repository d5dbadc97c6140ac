"""How much memory of a device something takes, by what it is taken for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs


@attrs.frozen(kw_only=True)
class Footprint:
    """The memory that is taken at one moment.

    Attributes:
        moment: which, in words.
        parts: bytes by what they are taken for.
    """

    moment: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def beside(self, parts: Mapping[str, int]) -> Footprint:
        """The same moment with what is there all the time."""
        return Footprint(moment=self.moment, parts={**parts, **self.parts})

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in self.parts.items() if size)
        return f"{self.total / 1e9:.2f} GB {self.moment}: {shown}"


def largest(moments: Iterable[Footprint]) -> Footprint:
    """The moment at which most is taken, the first of several."""
    return max(moments, key=lambda one: one.total)
