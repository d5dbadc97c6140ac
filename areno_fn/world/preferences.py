"""Rows of two answers as tokens, of which the one under `chosen` is preferred to the one under `rejected`.

The answers are texts or turns behind a `prompt` (text or turns), a `question` or an `instruction`; or they are two
whole conversations, and what they share is the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areno_fn.contracts.batch import Example, Pair
from areno_fn.contracts.errors import DataError
from areno_fn.world import data_schema
from areno_fn.world.chat import encode_conversation
from areno_fn.world.data_row import Row
from areno_fn.world.data_schema import PAIR, PROMPT_KEYS, Prompt
from areno_fn.world.examples import Flagged, Overlong, encode_answer, fit, require_template
from areno_fn.world.tokenizer import Tokenizer

Turns = tuple[dict[str, Any], ...]

_LEGAL = (
    "legal are texts or lists of messages behind a prompt, or two whole conversations with the same beginning, "
    "under 'chosen' and 'rejected'"
)


def encode_pairs(rows: Sequence[Row], tokenizer: Tokenizer, max_length: int, overlong: Overlong) -> tuple[Pair, ...]:
    """Rows of preferences as pairs of tokenised documents, with the tokens of the answers trained.

    Args:
        max_length: most tokens of a document.
        overlong: what happens to a row with a longer document. "error" refuses it; "truncate" cuts the document on
            the right; "drop" leaves the row out.

    Raises:
        DataError: a row cannot be encoded, is longer than allowed, or has two equal answers; or all were dropped.
    """
    pairs = []
    for index, row in enumerate(rows):
        sides = _encode(row, tokenizer)
        if overlong == "drop" and max(len(ids) for ids, _ in sides) > max_length:
            continue
        documents = []
        for key, (ids, trained) in zip(PAIR, sides, strict=True):
            ids, trained = fit(ids, trained, max_length, overlong, f"{row.where}, {key}")
            documents.append(Example(tokens=tuple(ids), trained=tuple(trained), row=index))
        if documents[0].tokens == documents[1].tokens:
            raise DataError(
                f"{row.where}: 'chosen' and 'rejected' are the same {len(documents[0].tokens)} tokens, so there is "
                f"nothing to prefer; remove the row, or raise max_length {max_length} if both were cut to it"
            )
        pairs.append(Pair(chosen=documents[0], rejected=documents[1]))
    if not pairs:
        raise DataError(
            f"all {len(rows)} rows are longer than max_length {max_length} and were dropped; raise max_length"
        )
    return tuple(pairs)


def _encode(row: Row, tokenizer: Tokenizer) -> tuple[Flagged, Flagged]:
    missing = [key for key in PAIR if key not in row]
    if missing:
        raise DataError(
            f"{row.where}: a row with the keys {', '.join(sorted(row))} has no {missing[0]!r}; {_LEGAL}; "
            f"the row is {data_schema.shown(row)}"
        )
    kinds = {type(row[key]) for key in PAIR}
    if list in kinds or isinstance(row.get("prompt"), list):
        require_template(tokenizer, row.where, "'prompt', 'chosen' and 'rejected'")
    if kinds == {str}:
        prompt = data_schema.prompt(row)
        chosen, rejected = (encode_answer(prompt, data_schema.text(row, key), tokenizer, row.where) for key in PAIR)
        return chosen, rejected
    if kinds == {list}:
        before, answers = _conversations(row)
        chosen, rejected = (
            encode_conversation([*before, *answer], tokenizer, row.where, first=len(before)) for answer in answers
        )
        return chosen, rejected
    received = " and ".join(type(row[key]).__name__ for key in PAIR)
    raise DataError(
        f"{row.where}: 'chosen' and 'rejected' are {received}; {_LEGAL}; the row is {data_schema.shown(row)}"
    )


def _conversations(row: Row) -> tuple[Turns, tuple[Turns, Turns]]:
    """The turns that are the prompt, and those of either answer."""
    chosen, rejected = (data_schema.turns(row, key) for key in PAIR)
    given = any(key in row for key in PROMPT_KEYS)
    if given and chosen[0]["role"] == rejected[0]["role"] == "assistant":
        return _turns(data_schema.prompt(row)), (chosen, rejected)
    chosen, rejected = (data_schema.messages(row, key) for key in PAIR)
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    before, answers = chosen[:shared], (chosen[shared:], rejected[shared:])
    if given:
        _require_opening(row, before)
    for key, answer in zip(PAIR, answers, strict=True):
        if not answer or answer[0]["role"] != "assistant":
            what = f"a turn of {answer[0]['role']!r}" if answer else "no further turn"
            raise DataError(
                f"{row.where}: 'chosen' and 'rejected' share their first {shared} messages, after which {key!r} has {what}; "
                f"the first that differs must be the assistant's answer in both"
            )
    return before, answers


def _turns(prompt: Prompt) -> Turns:
    return prompt.messages or ({"role": "user", "content": prompt.text},)


def _require_opening(row: Row, shared: Turns) -> None:
    """A prompt beside whole conversations must be in what they share."""
    prompt = data_schema.prompt(row)
    asked = [turn["content"] for turn in prompt.messages] if prompt.messages else [prompt.text]
    if not {*asked} <= {turn["content"] for turn in shared}:
        raise DataError(
            f"{row.where}: the prompt is not in the messages that 'chosen' and 'rejected' begin with; remove it, or "
            f"begin both with it"
        )
