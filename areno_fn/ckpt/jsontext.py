"""JSON from outside, read without the liberties that Python's reader takes."""

from __future__ import annotations

import collections
import json
import math
import re
from typing import Any

from areno_fn.ckpt.words import brief
from areno_fn.contracts.errors import CheckpointError

_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def strict_json(raw: bytes, what: str, *, finite: bool = False) -> Any:
    """JSON in which no key stands twice.

    Args:
        raw: its bytes.
        what: names it in messages.
        finite: refuse NaN, Infinity and numbers beyond float64, which a configuration may hold.

    Raises:
        CheckpointError: it is not that, it is nested too deeply, or a string holds half of a surrogate pair.
    """
    if b"\0" in raw:  # before a second copy is made of what may be a hole of 100 MB in a small file
        raise CheckpointError(f"{what} is not valid JSON: it holds NUL bytes")
    options: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite} if finite else {}
    try:
        text = raw.decode("utf-8")
        values = json.loads(text, object_pairs_hook=_unique, **options)
        if _HALF_CHARACTER.search(text):  # written as text again, such a string would fail
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}") from None
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        repeated = sorted(name for name, count in counts.items() if count > 1)
        shown = ", ".join(brief(name) for name in repeated[:20])
        raise ValueError(f"{shown} stands twice in one object")
    return values


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond every number that can be held")
    return value
