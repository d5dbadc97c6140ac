"""Sizes of what a flow model makes, and which of them it can make."""

from __future__ import annotations

import attrs

from areno_fn.contracts.errors import SpecError


@attrs.frozen(kw_only=True)
class Size:
    """The size of an output.

    Attributes:
        height, width: in pixels.
        frames: of a video; 1 for a picture.
    """

    height: int
    width: int
    frames: int = 1

    def __str__(self) -> str:
        frames = f" x {self.frames} frames" if self.frames > 1 else ""
        return f"{self.height} x {self.width}{frames}"


def _ordered(pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(set(pairs)))


@attrs.frozen(kw_only=True)
class Geometry:
    """Which sizes can be made, exactly.

    Attributes:
        multiple: heights and widths are multiples of it.
        default: the size where none is asked for.
        most: largest height and width; 0: no bound.
        frames_multiple: frames are a multiple of it, and one more; 0: there is one frame.
        buckets: the only pairs of height and width that are allowed, in any order; none: all.

    Raises:
        SpecError: the default is none of the sizes.
    """

    multiple: int
    default: Size
    most: int = 0
    frames_multiple: int = 0
    buckets: tuple[tuple[int, int], ...] = attrs.field(default=(), converter=_ordered)

    def __attrs_post_init__(self) -> None:
        if self.multiple < 1 or self.most < 0 or self.frames_multiple < 0:
            raise SpecError("a geometry needs a multiple of at least 1, and most and frames_multiple of at least 0")
        problem = self.problem(self.default)
        if problem:
            raise SpecError(f"the default size of a geometry must be one that it allows: {problem}")

    def problem(self, size: Size) -> str | None:
        """The clause that a size breaks, and how; None where it can be made."""
        for name, side in (("height", size.height), ("width", size.width)):
            if side < self.multiple or side % self.multiple:
                return f"geometry.multiple: the {name} must be a multiple of {self.multiple}, received {side}"
            if self.most and side > self.most:
                return f"geometry.most: the {name} is at most {self.most}, received {side}"
        if self.buckets and (size.height, size.width) not in self.buckets:
            allowed = ", ".join(f"{height} x {width}" for height, width in self.buckets)
            return f"geometry.buckets: {size.height} x {size.width} is none of {allowed}"
        if not self.frames_multiple and size.frames != 1:
            return f"geometry.frames: one frame is made, received {size.frames}"
        if size.frames < 1 or (self.frames_multiple and (size.frames - 1) % self.frames_multiple):
            return (
                f"geometry.frames: the number of frames must be a multiple of {self.frames_multiple}, and one more, "
                f"received {size.frames}"
            )
        return None

    def within(self, other: Geometry) -> bool:
        """Whether every size that is allowed here is allowed there."""
        most = not other.most or 0 < self.most <= other.most
        frames = self.frames_multiple == other.frames_multiple or (
            bool(other.frames_multiple) and self.frames_multiple % other.frames_multiple == 0
        )
        if self.buckets:
            sizes = (Size(height=h, width=w, frames=self.default.frames) for h, w in self.buckets)
            return frames and all(other.problem(size) is None for size in sizes)
        return most and frames and not other.buckets and self.multiple % other.multiple == 0
