"""Prompts that are longer than what an encoder reads of them, told before a run: what is behind its limit means nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areno_fn.contracts.flow_adapter import Lengths, Parts, PromptReader
from areno_fn.world.data_row import Row

WORDS = ("prompt", "negative_prompt")
"""The fields of a row that are put to text encoders."""

_SLACK = 2
"""Tokens that a text in ASCII may have beyond its letters and what stands around any prompt."""


def cut_prompts(reader: PromptReader, parts: Parts, rows: Sequence[Row]) -> list[str]:
    """A sentence for every data set of which a prompt is cut.

    Args:
        reader: knows what is read.
        parts: the tokenizers.
        rows: of all data sets.
    """
    around = reader.lengths(parts, "")
    known: dict[str, Lengths] = {}
    found: dict[str, list[tuple[Row, Lengths]]] = {}
    for row in rows:
        for text in _words(row):
            if text not in known:
                known[text] = {} if _surely_short(text, around) else _beyond(reader.lengths(parts, text))
            if known[text]:
                found.setdefault(row.source, []).append((row, known[text]))
    return [_sentence(source, cut) for source, cut in found.items()]


def _words(row: Mapping[str, Any]) -> list[str]:
    """The texts of a row, each once."""
    return list(dict.fromkeys(row[name] for name in WORDS if isinstance(row.get(name), str)))


def _surely_short(text: str, around: Lengths) -> bool:
    """A token is a letter of ASCII at least, so that most prompts need not be counted."""
    return text.isascii() and all(len(text) + other + _SLACK <= most for other, most in around.values())


def _beyond(lengths: Lengths) -> Lengths:
    return {name: (length, most) for name, (length, most) in lengths.items() if length > most}


def _sentence(source: str, cut: Sequence[tuple[Row, Lengths]]) -> str:
    first, lengths = cut[0]
    places = len({row.where for row, _ in cut})
    told = " and ".join(f"{most} of {length} tokens by {name}" for name, (length, most) in lengths.items())
    rows = f"{places} rows have a prompt that is" if places > 1 else "1 row has a prompt that is"
    return f"data set {source}: {rows} cut, the first {first.where}, read to {told}"
