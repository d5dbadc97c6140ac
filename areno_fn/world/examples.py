"""Rows as tokens: `encode_examples` for training on them, `encode_prompts` for generating from them.

Both take a row's prompt through the same functions, so a prompt has the same tokens in training and generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from areno_fn.contracts.batch import Example
from areno_fn.contracts.errors import DataError
from areno_fn.world import data_schema
from areno_fn.world.chat import encode_conversation, encode_opening, end_token, ends
from areno_fn.world.data_row import Row
from areno_fn.world.data_schema import Prompt
from areno_fn.world.tokenizer import Tokenizer
from areno_fn.world.tokenizer_segments import encode_segments

Overlong = Literal["error", "truncate", "drop"]
Flagged = tuple[list[int], list[bool]]


def encode_examples(rows: Sequence[Row], tokenizer: Tokenizer, max_length: int, overlong: Overlong) -> list[Example]:
    """Training rows as tokens, with the tokens of the response (of a `text`, all but the first) trained.

    A text starts with the tokenizer's BOS where it has one and the text does not; a conversation has the BOS
    its template writes. A response ends with one end token, appended where it has none. `Example.row` is the
    index in `rows`.

    Args:
        max_length: most tokens of an example.
        overlong: what happens to a longer row. "error" refuses it; "truncate" cuts it on the right, end token
            included; "drop" leaves it out, so that `len(rows) - len(result)` rows are missing.

    Raises:
        DataError: a row cannot be encoded, is longer than allowed, or has no trained token (left); or all were dropped.
    """
    examples = []
    for index, row in enumerate(rows):
        ids, trained = _encode(row, tokenizer)
        if len(ids) > max_length and overlong == "drop":
            continue
        ids, trained = fit(ids, trained, max_length, overlong, row.where)
        examples.append(Example(tokens=tuple(ids), trained=tuple(trained), row=index))
    if not examples:
        raise DataError(
            f"all {len(rows)} rows are longer than max_length {max_length} and were dropped; raise max_length"
        )
    return examples


def encode_prompts(rows: Sequence[Row], tokenizer: Tokenizer, limit: int) -> tuple[tuple[int, ...], ...]:
    """The tokens of every row's prompt, in the order of the rows, up to where the model continues.

    Args:
        limit: most tokens of a prompt: what the context leaves beside the response.

    Raises:
        DataError: a row without a usable prompt, or with one longer than `limit`.
    """
    prompts = []
    for row in rows:
        prompt = data_schema.prompt(row)
        if prompt.text is None:
            require_template(tokenizer, row.where, "'prompt'")
        ids = encode_prompt(prompt, tokenizer, row.where)
        if not ids:
            raise DataError(f"{row.where}: the prompt has no tokens; there must be at least one to continue from")
        if len(ids) > limit:
            raise DataError(
                f"{row.where}: the prompt has {len(ids)} tokens, but the context leaves {limit} beside the response; "
                "shorten the prompt, raise max_length or lower max_tokens"
            )
        prompts.append(tuple(ids))
    return tuple(prompts)


def plain_questions(rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, trained: bool = False) -> int:
    """How many questions and instructions become plain texts that end their line, because there is no chat template.

    Args:
        trained: the rows are trained on as `encode_examples` does, which takes some that hold a question for a text.
    """
    if tokenizer.chat:
        return 0
    return sum(data_schema.asked(row) and not (trained and data_schema.complete(row) == ("text",)) for row in rows)


def require_template(tokenizer: Tokenizer, where: str, texts: str) -> None:
    """Refuses messages for a tokenizer that has no chat template.

    Args:
        texts: what would have to be text instead, for the sentence.

    Raises:
        DataError: it has none.
    """
    if not tokenizer.chat:
        raise DataError(f"{where}: it holds messages, but the tokenizer has no chat template; give {texts} as text")


def _encode(row: Row, tokenizer: Tokenizer) -> Flagged:
    keys = data_schema.schema(row)
    if keys == ("messages",):
        turns = data_schema.messages(row, "messages")
        require_template(tokenizer, row.where, "'prompt' and 'response'")
        return encode_conversation(turns, tokenizer, row.where)
    if keys == ("text",):
        ids = begun(tokenizer.encode(data_schema.text(row, "text")), tokenizer)
        ids = _close(ids, tokenizer, row.where)
        return ids, [index > 0 for index in range(len(ids))]
    prompt = data_schema.prompt(row)
    if prompt.text is None:
        require_template(tokenizer, row.where, "'prompt' and 'response'")
    return encode_answer(prompt, data_schema.text(row, keys[1]), tokenizer, row.where)


def encode_answer(prompt: Prompt, response: str, tokenizer: Tokenizer, where: str) -> Flagged:
    """A prompt and a response in text as tokens, those of the response trained."""
    turns = turns_for(prompt, tokenizer)
    if turns is not None:
        return encode_conversation(
            [*turns, {"role": "assistant", "content": response}], tokenizer, where, first=len(turns)
        )
    before, after = encode_segments(tokenizer, [prompt.text or "", response], where)
    if tokenizer.bos_id is not None and tokenizer.bos_id in after:
        raise DataError(f"{where}: the response holds the BOS token {tokenizer.bos_id}; it belongs before the prompt")
    before, after = begun(before, tokenizer), _close(after, tokenizer, where)
    trained = [False] * len(before) + [True] * len(after)
    # the first token of a document is nobody's target
    return before + after, [False, *trained[1:]]


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, where: str) -> list[int]:
    """A prompt as tokens, up to where the model continues.

    Raises:
        DataError: the chat template refuses its messages.
    """
    turns = turns_for(prompt, tokenizer)
    if turns is not None:
        return encode_opening(turns, tokenizer, where)
    return begun(tokenizer.encode(prompt.text or ""), tokenizer)


def turns_for(prompt: Prompt, tokenizer: Tokenizer) -> tuple[dict[str, Any], ...] | None:
    """The turns to render, or `None` where the prompt is a plain text for this tokenizer."""
    return prompt.messages if tokenizer.chat or prompt.text is None else None


def begun(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids of a plain text, behind the BOS where the tokenizer starts with one."""
    return ids if tokenizer.bos_id is None or ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id, *ids]


def _close(ids: list[int], tokenizer: Tokenizer, where: str) -> list[int]:
    return ids if ends(ids[-1:], tokenizer) else [*ids, end_token(tokenizer, where)]


def fit(ids: list[int], trained: list[bool], max_length: int, overlong: Overlong, where: str) -> Flagged:
    """A row of at most `max_length` tokens, cut where that is allowed.

    Raises:
        DataError: it is too long and may not be cut, or nothing that is trained is left.
    """
    if len(ids) > max_length and overlong == "error":
        raise DataError(
            f"{where}: the row has {len(ids)} tokens ({sum(trained)} of them trained), but max_length is {max_length}; "
            "shorten it, raise max_length, or set overlong to 'truncate' or 'drop'"
        )
    kept = trained[:max_length]
    if any(trained) and not any(kept):
        raise DataError(
            f"{where}: the {trained.index(True)} tokens before the response fill max_length {max_length}, so cutting the row "
            "would leave nothing to train on; shorten the prompt or raise max_length"
        )
    if not any(kept):
        raise DataError(
            f"{where}: the row has no token to train on; a response, or a text of at least two tokens, is needed"
        )
    return ids[:max_length], kept
