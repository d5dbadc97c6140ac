"""Frozen parts are loaded once, when something needs them; conditions are kept, targets never."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areno_fn.contracts.components import Component, Components, Located
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.media import Media, Request
from areno_fn.engine.conditions import ConditionCache
from areno_fn.engine.parts import FrozenParts

DECLARED = (
    Component(name="transformer", trained=True),
    Component(name="vae"),
    Component(name="text"),
    Component(name="extra", optional=True),
    Component(name="words", alias="text"),
)
INDEX = {"transformer": ("diffusers", "T"), "vae": ("diffusers", "V"), "text": ("transformers", "C"), "extra": None}


class Loads:
    """Counts what is loaded."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, part: Located) -> Any:
        self.names.append(part.name)
        return object()


def frozen_parts() -> tuple[FrozenParts, Loads]:
    loads = Loads()
    return FrozenParts(Components(declared=DECLARED, index=INDEX), loads), loads


def test_R2_R4_parts_are_loaded_once_when_they_are_needed() -> None:
    frozen, loads = frozen_parts()
    assert frozen.of(None) == {} and frozen.materialised == ()
    first = frozen.of(["words", "extra"])
    assert first.keys() == {"words"} and loads.names == ["text"]
    assert frozen.of(["text"])["text"] is first["words"]
    assert frozen.of(None).keys() == {"text"} and frozen.materialised == ("text",)
    frozen.of(["vae", "text"])
    assert loads.names == ["text", "vae"]


def test_R3_what_is_trained_or_not_declared_is_no_frozen_part() -> None:
    frozen, loads = frozen_parts()
    for name in ("transformer", "vea"):
        with pytest.raises(SpecError, match=name):
            frozen.of(["text", name])
    assert loads.names == []


class Adapter:
    """Encodes a prompt as its length, and counts how often."""

    class contract:
        family = "heron"
        preparer = ("text",)

    def __init__(self, name: str = "text") -> None:
        self.asked: list[str] = []
        self.name = name

    def encode_conditions(self, parts: Any, request: Request, *, negative: bool) -> Conditions:
        self.asked.append(request.prompt)
        assert set(parts) == {"text"} and not torch.is_grad_enabled()
        rows = torch.full((1, 4), float(len(request.prompt)))
        return Conditions(positive={self.name: rows}, negative={self.name: -rows} if negative else None)


def request(prompt: str, shade: float | None = None) -> Request:
    media = () if shade is None else (Media(type="image", data=torch.full((3, 2, 2), shade)),)
    return Request(prompt=prompt, media=media)


def test_a_request_is_encoded_once_and_by_itself() -> None:
    adapter = Adapter()
    cache = ConditionCache(adapter, frozen_parts()[0])
    asked = [request("a"), request("bb"), request("a")]
    found = cache.stacked(asked, torch.device("cpu"), negative=True)
    assert found.positive["text"][:, 0].tolist() == [1, 2, 1] and found.negative["text"][:, 0].tolist() == [-1, -2, -1]
    assert adapter.asked == ["a", "bb"]
    cache.stacked(asked, torch.device("cpu"), negative=True)
    assert adapter.asked == ["a", "bb"]
    assert cache.of(request("a"), negative=False).negative is None
    cache.of(request("a", 0.5), negative=True)
    cache.of(request("a", 0.6), negative=True)
    assert adapter.asked == ["a", "bb", "a", "a", "a"]  # another medium is another request


def test_what_has_not_been_asked_for_longest_is_forgotten_first() -> None:
    adapter = Adapter()
    cache = ConditionCache(adapter, frozen_parts()[0], most_bytes=2 * 4 * 4)
    for prompt in ("a", "bb", "a", "ccc", "a", "bb"):
        cache.of(request(prompt), negative=False)
    assert adapter.asked == ["a", "bb", "ccc", "bb"]


def test_a_condition_that_is_called_as_a_state_is_refused() -> None:
    cache = ConditionCache(Adapter("latents"), frozen_parts()[0])
    with pytest.raises(SpecError, match="heron: a condition may not be called 'latents'"):
        cache.of(request("a"), negative=False)
