"""Rewards that live elsewhere: in the folder of a CLIP model, or behind an address."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from areno_fn.contracts.spec_base import Natural, Positive, Spec


class ClipReward(Spec, frozen=True, kw_only=True, tag="clip", tag_field="kind"):
    """How well pictures fit a text, by a CLIP model in a Hugging Face folder: the cosine of what it makes of both.

    `scaled` multiplies by the model's own temperature, as PickScore is meant. The text is `prompt` with fields of the data
    row in braces. It reads `batch` pictures at once.
    """

    path: str
    prompt: str = "{prompt}"
    scaled: bool = False
    weight: float = 1.0
    name: str = ""
    data: list[str] = field(default_factory=list)
    batch: Positive = 16


class HttpReward(Spec, frozen=True, kw_only=True, tag="http", tag_field="kind"):
    """A judge behind an address, asked about `batch` samples at once.

    It is sent JSON, `{"rows": [...], "pictures": [PNG in base64, ...]}`, or `"completions"` of a model of text, and answers
    `{"rewards": [...]}`. What does not answer within `timeout` seconds, or answers that it is busy or broken, is asked
    `retries` times more, after longer and longer waits.
    """

    url: Annotated[str, Meta(pattern="^https?://")]
    weight: float = 1.0
    name: str = ""
    data: list[str] = field(default_factory=list)
    batch: Positive = 16
    timeout: Annotated[float, Meta(gt=0)] = 60.0
    retries: Natural = 3
