"""Conversations as tokens: the chat template decides the text, and assistant turns are what is trained."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from areno_fn.contracts.errors import DataError
from areno_fn.world.tokenizer import Messages, Tokenizer
from areno_fn.world.tokenizer_segments import encode_segments


@attrs.frozen(kw_only=True)
class Turn:
    """Where an assistant's turn stands in the rendered conversation, in characters.

    Attributes:
        message: index of the message.
        start: the first character the assistant says.
        end: one past the last character of the turn, or `None` where the template gives no way to tell.
    """

    message: int
    start: int
    end: int | None


def encode_opening(messages: Messages, tokenizer: Tokenizer, where: str) -> list[int]:
    """The tokens of a conversation up to where the assistant is to speak. The template alone decides about a BOS.

    Raises:
        DataError: the template refuses the messages, or there is none.
    """
    return tokenizer.encode(_render(messages, tokenizer, where, generate=True))


def encode_conversation(
    messages: Messages, tokenizer: Tokenizer, where: str, first: int = 0
) -> tuple[list[int], list[bool]]:
    """The tokens of a whole conversation, and for each whether it is trained.

    A turn of the assistant is trained up to and with its first end token, which is where generation would stop.
    What stands before it is what the template writes when the assistant is asked to speak, so the tokens before
    a turn are those of inference. The last turn gets an end token where the template writes none.

    Args:
        first: turns before this message are not trained.

    Raises:
        DataError: there is no turn to train, or it cannot be found in what the template writes.
    """
    full = _render(messages, tokenizer, where, generate=False)
    spoken = [k for k, message in enumerate(messages) if k >= first and message["role"] == "assistant"]
    if not spoken:
        raise DataError(f"{where}: no message has the role 'assistant', so there is nothing to train on")
    turns = [_locate(messages, k, full, tokenizer, where) for k in spoken]
    pieces = encode_segments(tokenizer, _cut(full, turns), where)
    ids: list[int] = []
    trained: list[bool] = []
    for turn, context, said in zip(turns, pieces[0::2], pieces[1::2], strict=False):
        count = _trained_tokens(said, turn, tokenizer, where)
        ids += context + said
        trained += [False] * len(context) + [index < count for index in range(len(said))]
    ids += pieces[-1]
    trained += [False] * len(pieces[-1])
    if messages[-1]["role"] == "assistant" and not ends(pieces[-2], tokenizer):
        return [*ids, end_token(tokenizer, where)], [*trained, True]
    return ids, trained


def ends(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Any end token is among the ids."""
    return any(token in tokenizer.eos_ids for token in ids)


def end_token(tokenizer: Tokenizer, where: str) -> int:
    """The end token that training rows get.

    Raises:
        DataError: the tokenizer has none.
    """
    if not tokenizer.eos_ids:
        raise DataError(
            f"{where}: the tokenizer has no end token, so no response could be learnt to stop; give it an eos_token"
        )
    return tokenizer.eos_ids[0]


def _render(messages: Messages, tokenizer: Tokenizer, where: str, *, generate: bool) -> str:
    try:
        return tokenizer.render(messages, generate)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _locate(messages: Messages, k: int, full: str, tokenizer: Tokenizer, where: str) -> Turn:
    """Finds turn k. Some templates write a turn differently when others follow; then its end stays open."""
    opening = _render(messages[:k], tokenizer, where, generate=True)
    if not full.startswith(opening):
        raise DataError(
            f"{where}: the chat template writes messages[{k}] of the conversation differently from how it asks the assistant "
            f"to speak ({opening[-40:]!r}), so what is learnt would not be what is generated from; use another template"
        )
    closing = _render(messages[: k + 1], tokenizer, where, generate=False)
    return Turn(message=k, start=len(opening), end=len(closing) if full.startswith(closing) else None)


def _cut(full: str, turns: Sequence[Turn]) -> list[str]:
    """The text as context, turn, context, turn, .., rest. A turn with an open end reaches to where the next one begins."""
    segments: list[str] = []
    position = 0
    for turn, limit in zip(turns, [*(t.start for t in turns[1:]), len(full)], strict=True):
        end = limit if turn.end is None else turn.end
        segments += [full[position : turn.start], full[turn.start : end]]
        position = end
    return [*segments, full[position:]]


def _trained_tokens(said: Sequence[int], turn: Turn, tokenizer: Tokenizer, where: str) -> int:
    """How many leading tokens of a turn are trained."""
    for index, token in enumerate(said):
        if token in tokenizer.eos_ids:
            return index + 1
    if turn.end is None:
        raise DataError(
            f"{where}: the chat template ends messages[{turn.message}] with no end token ({list(tokenizer.eos_ids)}) and writes it "
            "differently when other turns follow, so its end cannot be found; use another template"
        )
    return len(said)
