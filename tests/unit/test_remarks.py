"""What a dry run says of a phase reads as a sentence, of one row as of several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from typeguard import suppress_type_checks

from areno_fn.engine import text_medium
from areno_fn.engine.phases import PhasePlan
from areno_fn.engine.text_medium import Text


@pytest.mark.parametrize(
    ("rows", "there", "said"),
    [
        (2, 2, []),
        (2, 1, ["batch.rows is 2, but the data have 1 row, which is every batch"]),
        (9, 3, ["batch.rows is 9, but the data have 3 rows, so that every batch is all of them"]),
    ],
)
def test_a_batch_of_more_rows_than_there_are(rows: int, there: int, said: list[str]) -> None:
    phase = SimpleNamespace(spec=SimpleNamespace(batch=SimpleNamespace(rows=rows)), size=there)
    with suppress_type_checks():
        assert PhasePlan.remarks(cast(Any, phase)) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, []),
        (
            1,
            [
                "1 question or instruction becomes a plain text that ends its line, because the tokenizer has no chat template"
            ],
        ),
        (
            2,
            [
                "2 questions or instructions become plain texts that end their line, because the tokenizer has no chat template"
            ],
        ),
    ],
)
def test_questions_without_a_chat_template(count: int, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_medium, "plain_questions", lambda rows, tokenizer, *, trained: count)
    with suppress_type_checks():
        assert Text.remarks(cast(Any, SimpleNamespace(tokenizer=None)), [], trained=True) == said
