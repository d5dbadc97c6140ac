"""Which shapes a row may have, and what prompt and response each one means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from areno_fn.contracts.errors import DataError
from areno_fn.world.data_row import Row

SCHEMAS = (
    ("messages",),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "output"),
    ("text",),
)
"""Keys that make a training row; the first group that is complete decides."""

PAIR = ("chosen", "rejected")
"""Keys of two answers to compare: texts or turns behind a prompt, or two conversations that share their beginning."""

PROMPT_KEYS = ("prompt", "question", "instruction")
"""Keys that make a row to generate from; the first that is there decides. Everything else is for the reward."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may speak in a conversation: a template would pass over any other, or write it as it stands."""

_LONGEST = 160
"""Characters of a row that an error shows."""

_LEGAL = (
    "messages, prompt + response, question + answer, instruction (+ input) + output, "
    "text, chosen + rejected, or a prompt or question alone"
)


@attrs.frozen(kw_only=True)
class Prompt:
    """What comes before the response; at least one of the two is given.

    Attributes:
        text: to be continued as it stands. Used where `messages` is absent, or the tokenizer has no chat template.
        messages: turns for the chat template.
    """

    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None


def schema(row: Row) -> tuple[str, ...]:
    """The training schema of a row, one of `SCHEMAS`.

    Raises:
        DataError: the row has a prompt only, or no known shape.
    """
    keys = complete(row)
    if keys is not None:
        return keys
    raise DataError(
        f"{row.where}: a row with the keys {_keys(row)} has nothing to train on; legal shapes are {_LEGAL}; "
        f"the row is {shown(row)}"
    )


def complete(row: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The first of `SCHEMAS` whose keys are all there."""
    return next((keys for keys in SCHEMAS if all(map(row.__contains__, keys))), None)


def require_schema(row: Row) -> None:
    """Refuses a row that can neither be trained on nor generated from.

    Raises:
        DataError: names the keys it has and the shapes there are.
    """
    if not any(key in row for key in PROMPT_KEYS):
        known = any(all(key in row for key in keys) for keys in (*SCHEMAS, PAIR))
        if not known:
            raise DataError(
                f"{row.where}: a row with the keys {_keys(row)} has no known shape; legal shapes are {_LEGAL}; "
                f"`columns` renames keys; the row is {shown(row)}"
            )


def prompt(row: Row) -> Prompt:
    """What is to be continued.

    A `prompt` in text is taken as it stands. A question, or an instruction with its input below it, is a
    user's turn for a tokenizer with a chat template, and for any other a text that ends its line.

    Raises:
        DataError: there is none, or it is not of the right type.
    """
    for key in PROMPT_KEYS:
        if key in row:
            break
    else:
        raise DataError(
            f"{row.where}: a row with the keys {_keys(row)} has no prompt; give 'prompt' or 'question', or rename "
            f"a key with `columns`; the row is {shown(row)}"
        )
    if key == "prompt":
        return Prompt(messages=_opening(row, key)) if isinstance(row[key], list) else Prompt(text=text(row, key))
    asked = text(row, key)
    if key == "instruction" and row.get("input"):
        asked = f"{asked}\n{text(row, 'input')}"
    return Prompt(text=f"{asked}\n", messages=({"role": "user", "content": asked},))


def asked(row: Mapping[str, Any]) -> bool:
    """Whether what is to be continued is a question or an instruction, and no `prompt`."""
    return next((key for key in PROMPT_KEYS if key in row), "prompt") != "prompt"


def text(row: Row, key: str) -> str:
    """The text under a key.

    Raises:
        DataError: it is something else.
    """
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{row.where}: {key!r} must be text, received {_kind(value)}; the row is {shown(row)}")
    return value


def messages(row: Row, key: str) -> tuple[dict[str, Any], ...]:
    """The conversation under a key. Keys of a turn besides role and content go to the chat template as they are.

    Raises:
        DataError: it is not a list of turns with a role and a content in text, or the assistant has the first word.
    """
    found = turns(row, key)
    if found[0]["role"] == "assistant":
        raise DataError(
            f"{row.where}: {key} begins with the assistant; a conversation begins with a system or user turn"
        )
    return found


def turns(row: Row, key: str) -> tuple[dict[str, Any], ...]:
    """The turns under a key, whoever has the first word.

    Raises:
        DataError: it is not a list of turns with a role and a content in text.
    """
    given = row[key]
    if not isinstance(given, list) or not given:
        raise DataError(
            f"{row.where}: {key!r} must be a list of at least one message, received {_kind(given)}; the row is {shown(row)}"
        )
    for index, turn in enumerate(given):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(name), str) for name in ("role", "content")):
            raise DataError(
                f"{row.where}: {key}[{index}] must be an object with 'role' and 'content' in text; the row is {shown(row)}"
            )
        if turn["role"] not in ROLES:
            raise DataError(
                f"{row.where}: {key}[{index}] has the role {turn['role']!r}; roles are {', '.join(ROLES)}; "
                f"the row is {shown(row)}"
            )
    return tuple(given)


def _opening(row: Row, key: str) -> tuple[dict[str, Any], ...]:
    turns = messages(row, key)
    if turns[-1]["role"] == "assistant":
        raise DataError(
            f"{row.where}: {key} ends with the assistant's turn; it must end with the turn that is to be answered"
        )
    return turns


def _keys(row: Row) -> str:
    return ", ".join(sorted(row)) or "none"


def shown(row: Row) -> str:
    """The row as JSON on one line, as far as it is of help."""
    line = json.dumps(row, ensure_ascii=False, default=repr)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def _kind(value: Any) -> str:
    return f"{type(value).__name__} of length {len(value)}" if isinstance(value, list) else type(value).__name__
