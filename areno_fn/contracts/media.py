"""Media that go into a flow model and come out of it, and the rules of what it takes. Shape letters: C, H, W, T, L.

A picture is float32 [C, H, W], a video [T, C, H, W], both from 0 to 1; sound is [C, L], from -1 to 1.
"""

from __future__ import annotations

import hashlib
from typing import Literal, Protocol, get_args

import attrs
import torch

from areno_fn.contracts.errors import DataError, SpecError
from areno_fn.contracts.record import shown

MediaType = Literal["image", "video", "audio"]
MEDIA_TYPES: tuple[MediaType, ...] = get_args(MediaType)
Binding = Literal["grouped", "ordered_references"]
Order = Literal["insensitive", "within_type", "global"]

_DIMS: dict[MediaType, int] = {"image": 3, "video": 4, "audio": 2}
_LOWEST: dict[MediaType, float] = {"image": 0.0, "video": 0.0, "audio": -1.0}


class Stored(Protocol):
    """Numbers that are read each time they are needed, from files that have been looked at."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Theirs."""
        ...

    @property
    def digest(self) -> bytes:
        """Of what they are read from."""
        ...

    def read(self) -> torch.Tensor:
        """The numbers, float32, as the module says.

        Raises:
            DataError: they can no longer be read.
        """
        ...


@attrs.frozen(kw_only=True, eq=False)
class Media:
    """One picture, video or sound.

    Attributes:
        type: which.
        source: given as `data`: numbers as the module says, or what reads them.
        slot: what it is for, such as "first_frame"; empty where only the order counts.

    Raises:
        DataError: it is not finite numbers in the range and of the shape of its type.
    """

    type: MediaType
    source: torch.Tensor | Stored = attrs.field(alias="data")
    slot: str = ""

    @property
    def data(self) -> torch.Tensor:
        """The numbers; those that are stored are read anew."""
        return self.source if isinstance(self.source, torch.Tensor) else self.source.read()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers, which are not read for it."""
        return tuple(self.source.shape)

    @property
    def content(self) -> bytes:
        """All bytes of the numbers, or a digest of what they are read from."""
        if isinstance(self.source, torch.Tensor):
            return self.source.contiguous().numpy().tobytes()
        return self.source.digest

    def __attrs_post_init__(self) -> None:
        if len(self.shape) != _DIMS[self.type]:
            raise DataError(
                f"a medium of type {self.type!r} is float32 with {_DIMS[self.type]} dimensions, received {list(self.shape)}"
            )
        if not isinstance(self.source, torch.Tensor):
            return
        if self.source.dtype != torch.float32 or not self.source.numel():
            raise DataError(
                f"a medium of type {self.type!r} is float32 with {_DIMS[self.type]} dimensions, received {shown(self.source)}"
            )
        low, high = (float(x) for x in self.source.aminmax())
        if not (low >= _LOWEST[self.type] and high <= 1):
            raise DataError(
                f"a medium of type {self.type!r} holds numbers from {_LOWEST[self.type]:g} to 1, received {low:g} to {high:g}"
            )


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Request:
    """What one output is to be like.

    Attributes:
        prompt: in words.
        negative_prompt: what it is not to be like; None where nothing is said.
        media: given pictures, videos and sounds, in order.
    """

    prompt: str
    negative_prompt: str | None = None
    media: tuple[Media, ...] = ()

    def __repr__(self) -> str:
        return f"Request({self.fingerprint})"

    @property
    def fingerprint(self) -> str:
        """A digest of all that it says, the bytes of its media included."""
        found = hashlib.sha256(repr((self.prompt, self.negative_prompt)).encode())
        for one in self.media:
            found.update(repr((one.type, one.slot, one.shape)).encode())
            found.update(one.content)
        return found.hexdigest()


@attrs.frozen(kw_only=True)
class InputRule:
    """How many media of a type may be given.

    Attributes:
        type: of the media.
        least, most: how many.
        slots: the names that they may have, in order; none where only the order counts.
        required_slots: those of them that must be there.

    Raises:
        SpecError: the rule contradicts itself.
    """

    type: MediaType
    least: int = 0
    most: int = 1
    slots: tuple[str, ...] = ()
    required_slots: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        where = f"the rule of {self.type!r}"
        if self.type not in MEDIA_TYPES:
            raise SpecError(f"{where}: there is no such type; choose one of {', '.join(MEDIA_TYPES)}")
        if not 0 <= self.least <= self.most or not self.most:
            raise SpecError(f"{where}: needs 0 <= least <= most and most >= 1, received {self.least} and {self.most}")
        if self.slots and len(self.slots) < self.most:
            raise SpecError(f"{where}: {self.most} media cannot have {len(self.slots)} slots; name a slot for each")
        if len(set(self.slots)) < len(self.slots):
            raise SpecError(f"{where}: a slot is named twice in {', '.join(self.slots)}")
        if self.required_slots != tuple(slot for slot in self.slots if slot in self.required_slots):
            raise SpecError(f"{where}: required_slots must be some of the slots, in their order")

    @property
    def certain(self) -> int:
        """How many are always there."""
        return max(self.least, len(self.required_slots))

    def within(self, other: InputRule) -> bool:
        """Whether all that this rule allows, the other allows."""
        return (
            other.least <= self.least
            and self.most <= other.most
            and self.slots == other.slots
            and set(other.required_slots) <= set(self.required_slots)
        )


def _canonical(rules: tuple[InputRule, ...]) -> tuple[InputRule, ...]:
    return tuple(sorted(rules, key=lambda rule: MEDIA_TYPES.index(rule.type)))


def _types(types: tuple[MediaType, ...]) -> tuple[MediaType, ...]:
    return tuple(sorted(set(types), key=MEDIA_TYPES.index))


@attrs.frozen(kw_only=True)
class InputMedia:
    """The media that a model takes beside a prompt.

    Attributes:
        rules: one a type; their order says nothing.
        binding: "grouped" by type and slot, or "ordered_references" that a prompt may count through.
        order: whether it says something: not at all, among those of a type, or among all.
        least_total, most_total: bounds of all together; None: those that follow from the rules.
        required_any: types of which at least one medium must be there.

    Raises:
        SpecError: the rules contradict each other.
    """

    rules: tuple[InputRule, ...] = attrs.field(default=(), converter=_canonical)
    binding: Binding = "grouped"
    order: Order = "insensitive"
    least_total: int = 0
    most_total: int | None = None
    required_any: tuple[MediaType, ...] = attrs.field(default=(), converter=_types)

    def __attrs_post_init__(self) -> None:
        types = [rule.type for rule in self.rules]
        if len(set(types)) < len(types):
            raise SpecError(f"the input media have two rules of one type: {', '.join(types)}")
        if (self.binding == "ordered_references") != (self.order == "global"):
            raise SpecError("media are ordered_references where their order is global, and nowhere else")
        if self.binding != "grouped" and any(rule.slots for rule in self.rules):
            raise SpecError("media with slots are grouped; ordered references have none")
        if self.order != "within_type" and any(len(rule.slots) > 1 for rule in self.rules):
            raise SpecError("media of several slots are ordered within their type")
        if not set(self.required_any) <= set(types):
            raise SpecError("required_any names a type that has no rule")
        low, high = sum(rule.certain for rule in self.rules), sum(rule.most for rule in self.rules)
        most = high if self.most_total is None else self.most_total
        if not (0 <= self.least_total <= min(high, most) and low <= most):
            raise SpecError(
                f"no media can meet the bounds: the rules allow {low} to {high}, all together {self.least_total} to {most}"
            )

    @property
    def certain(self) -> bool:
        """Whether there always is a medium."""
        return bool(self.least_total or self.required_any or any(rule.certain for rule in self.rules))

    def problem(self, media: tuple[Media, ...]) -> str | None:
        """The clause that given media break, and how; None where they keep all."""
        known = {rule.type: rule for rule in self.rules}
        for rule in self.rules:
            found = _broken(rule, [one for one in media if one.type == rule.type])
            if found:
                return f"inputs.{rule.type}: {found}"
        strange = [one.type for one in media if one.type not in known]
        if strange:
            return f"inputs.{strange[0]}: it takes none"
        if not self.least_total <= len(media) <= self.most:
            return f"inputs: it takes {_span(self.least_total, self.most)} media in all, received {len(media)}"
        if self.required_any and not any(one.type in self.required_any for one in media):
            return f"inputs.required_any: one of type {' or '.join(self.required_any)} is missing"
        return None

    @property
    def most(self) -> int:
        """The most media that can be given."""
        high = sum(rule.most for rule in self.rules)
        return high if self.most_total is None else min(high, self.most_total)

    def within(self, other: InputMedia) -> bool:
        """Whether all media that are taken here are taken there."""
        theirs = {rule.type: rule for rule in other.rules}
        if (self.binding, self.order) != (other.binding, other.order) and self.most > 0:
            return False
        if any(rule.type not in theirs or not rule.within(theirs[rule.type]) for rule in self.rules):
            return False
        left = [rule for rule in other.rules if rule.certain and rule.type not in {own.type for own in self.rules}]
        least = max(self.least_total, sum(rule.certain for rule in self.rules))
        some = set(self.required_any) | {rule.type for rule in self.rules if rule.certain}
        wanted = not other.required_any or bool(some & set(other.required_any))
        return not left and self.most <= other.most and least >= other.least_total and wanted


def _span(least: int, most: int) -> str:
    return str(most) if least == most else f"{least} to {most}"


def _broken(rule: InputRule, media: list[Media]) -> str | None:
    if not rule.least <= len(media) <= rule.most:
        return f"it takes {_span(rule.least, rule.most)} of these, received {len(media)}"
    slots = [one.slot for one in media]
    strange = [slot for slot in slots if slot and slot not in rule.slots]
    if strange:
        return f"there is no slot {strange[0]!r}; the slots are {', '.join(rule.slots) or 'none'}"
    named = [slot for slot in slots if slot]
    twice = [slot for slot in named if named.count(slot) > 1]
    if twice:
        return f"the slot {twice[0]!r} is filled twice"
    if rule.slots and len(rule.slots) > 1 and len(named) < len(slots):
        return f"a medium has no slot; name one of {', '.join(rule.slots)}"
    missing = [slot for slot in rule.required_slots if slot not in slots and len(rule.slots) > 1]
    return f"the slot {missing[0]!r} is empty" if missing else None
