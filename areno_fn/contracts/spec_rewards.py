"""What judges samples: functions, models in folders, and judges behind an address."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from areno_fn.contracts.spec_base import Place, Positive, Rate, Seconds, Spec, Weight


class FunctionReward(Spec, frozen=True, kw_only=True, tag="function", tag_field="kind"):
    """A reward `package.module:function`; its parameters say what it is called with.

    `(rows, completions)` is called with a whole batch, `(row, completions)` with the completions of one row, its group,
    and both return a number for each; `(row, completion)` returns one number. Any of them may be an `async def`, of
    which at most `concurrency` calls wait at once (0: 16). A class is made once without arguments, and what it makes
    is called. For a flow model they are `pictures`, or a `picture`, float32 [C, S, S] from 0 to 1. `data` names the data
    sets that are judged (none: all).
    """

    function: str
    weight: Weight = 1.0
    name: str = ""
    data: list[str] = field(default_factory=list)
    timeout: Seconds = 0.0
    concurrency: Annotated[int, Meta(ge=0, le=10_000)] = 0


class ModelReward(Spec, frozen=True, kw_only=True, tag="model", tag_field="kind"):
    """A frozen reward model: a Hugging Face folder for sequence classification with one label.

    A completion is worth the model's number at the last token of prompt and completion that is not the padding of its
    configuration, less `shift`, and with `clip` at most that far from 0. It reads the tokens as they were drawn, with
    the end token where one was drawn, when its tokenizer and chat template are the policy's; else the text with its own.
    """

    path: Place
    dtype: Literal["source", "float32", "bfloat16"] = "source"
    weight: Weight = 1.0
    name: str = ""
    data: list[str] = field(default_factory=list)
    shift: Weight = 0.0
    clip: Rate = 0.0
    micro_tokens: Positive = 8192


class ClipReward(Spec, frozen=True, kw_only=True, tag="clip", tag_field="kind"):
    """How well pictures fit a text, by a CLIP model in a Hugging Face folder: the cosine of what it makes of both.

    `scaled` multiplies by the model's own temperature, as PickScore is meant. The text is `prompt` with fields of the data
    row in braces. It reads `batch` pictures at once.
    """

    path: Place
    prompt: str = "{prompt}"
    scaled: bool = False
    weight: Weight = 1.0
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
    weight: Weight = 1.0
    name: str = ""
    data: list[str] = field(default_factory=list)
    batch: Positive = 16
    timeout: Annotated[float, Meta(gt=0, le=604_800)] = 60.0
    retries: Annotated[int, Meta(ge=0, le=1_000)] = 3


RewardSpec = FunctionReward | ModelReward | ClipReward | HttpReward
