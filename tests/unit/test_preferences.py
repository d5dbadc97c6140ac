"""Rows of two answers: which shapes there are, their tokens and flags, and the sentences about wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_folders import BOS_CHATML, byte_level

from areno_fn.contracts.errors import DataError
from areno_fn.world.data import read_jsonl
from areno_fn.world.data_row import Row
from areno_fn.world.examples import encode_examples, encode_prompts
from areno_fn.world.preferences import encode_pairs
from areno_fn.world.tokenizer_bytes import BOS, EOS, ByteTokenizer
from areno_fn.world.tokenizer_hf import HFTokenizer, load_hf

BYTES = ByteTokenizer()


def row(**values: Any) -> Row:
    return Row(values, "pairs.jsonl", 3)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def answer(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return load_hf(str(byte_level(tmp_path_factory.mktemp("chat"), template=BOS_CHATML)))


def test_texts_behind_a_prompt() -> None:
    given = row(prompt="1+1=", chosen="2", rejected="11")
    (pair,) = encode_pairs([given], BYTES, 64, "error")
    (prompt,) = encode_prompts([given], BYTES, 64)
    for example, text in ((pair.chosen, "2"), (pair.rejected, "11")):
        answered = BYTES.encode(text)
        assert example.tokens == (*prompt, *answered, EOS)
        assert example.trained == (False,) * len(prompt) + (True,) * (len(answered) + 1)
        assert example.row == 0


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": [user("a")], "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": [answer("b")], "rejected": [answer("c")]},
        {"question": "a", "chosen": [answer("b")], "rejected": [answer("c")]},
        {"chosen": [user("a"), answer("b")], "rejected": [user("a"), answer("c")]},
    ],
)
def test_messages_without_a_template_name_what_would_have_to_be_text(values: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        encode_pairs([row(**values)], BYTES, 64, "error")
    assert str(caught.value) == (
        "pairs.jsonl:3: it holds messages, but the tokenizer has no chat template; give 'prompt', 'chosen' and 'rejected' as text"
    )


def test_a_question_without_a_template_ends_its_line_in_every_algorithm() -> None:
    (pair,) = encode_pairs([row(question="a", chosen="b", rejected="c")], BYTES, 64, "error")
    (example,) = encode_examples([row(question="a", answer="b")], BYTES, 64, "error")
    (prompt,) = encode_prompts([row(question="a")], BYTES, 64)
    assert prompt == (BOS, *BYTES.encode("a\n"))
    assert pair.chosen.tokens == example.tokens == (*prompt, *BYTES.encode("b"), EOS)


def test_a_document_is_the_row_that_supervised_training_would_see(chat: HFTokenizer) -> None:
    before = [{"role": "system", "content": "brief"}, user("a"), answer("b"), user("c")]
    shapes = [
        ({"question": "c", "chosen": "x", "rejected": "y"}, lambda said: {"question": "c", "answer": said}),
        ({"prompt": "c", "chosen": "x", "rejected": "y"}, lambda said: {"prompt": "c", "response": said}),
        ({"prompt": before, "chosen": "x", "rejected": "y"}, lambda said: {"prompt": before, "response": said}),
        (
            {"prompt": before, "chosen": [answer("x")], "rejected": [answer("y")]},
            lambda said: {"prompt": before, "response": said},
        ),
        (
            {"prompt": "c", "chosen": [answer("x")], "rejected": [answer("y")]},
            lambda said: {"messages": [user("c"), answer(said)]},
        ),
        (
            {"prompt": "c", "chosen": [*before, answer("x")], "rejected": [*before, answer("y")]},
            lambda said: {"prompt": before, "response": said},
        ),
        (
            {"chosen": [*before, answer("x")], "rejected": [*before, answer("y")]},
            lambda said: {"prompt": before, "response": said},
        ),
    ]
    for values, alike in shapes:
        (pair,) = encode_pairs([row(**values)], chat, 500, "error")
        expected = encode_examples([row(**alike("x")), row(**alike("y"))], chat, 500, "error")
        for found, right in zip(pair.documents, expected, strict=True):
            assert (found.tokens, found.trained) == (right.tokens, right.trained), values


def test_answers_of_several_turns_train_what_the_assistant_says(chat: HFTokenizer) -> None:
    long = [user("a"), answer("b"), user("c"), answer("d")]
    (pair,) = encode_pairs([row(chosen=long, rejected=[user("a"), answer("e")])], chat, 500, "error")
    (whole,) = encode_examples([row(messages=long)], chat, 500, "error")
    assert (pair.chosen.tokens, pair.chosen.trained) == (whole.tokens, whole.trained)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"prompt": "a", "chosen": "b"}, "a row with the keys chosen, prompt has no 'rejected'"),
        ({"chosen": "b", "rejected": "c"}, "a row with the keys chosen, rejected has no prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": [answer("c")]}, "'chosen' and 'rejected' are str and list"),
        ({"prompt": "a", "chosen": 1, "rejected": 2}, "'chosen' and 'rejected' are int and int; legal are texts"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same .* tokens, so there is nothing to prefer"),
        (
            {"chosen": [user("a"), answer("b")], "rejected": [user("c"), answer("b")]},
            "share their first 0 messages, after which 'chosen' has a turn of 'user'",
        ),
        (
            {"chosen": [user("a"), answer("b")], "rejected": [user("a")]},
            "share their first 1 messages, after which 'rejected' has no further turn",
        ),
        (
            {"prompt": "z", "chosen": [user("a"), answer("b")], "rejected": [user("a"), answer("c")]},
            "the prompt is not in the messages that 'chosen' and 'rejected' begin with",
        ),
        ({"chosen": [answer("b")], "rejected": [answer("c")]}, "chosen begins with the assistant"),
        ({"chosen": [user("a"), {"role": "assistant"}], "rejected": []}, r"chosen\[1\] must be an object"),
    ],
)
def test_a_wrong_row_is_named(values: dict[str, Any], sentence: str, chat: HFTokenizer) -> None:
    with pytest.raises(DataError, match=f"^pairs.jsonl:3.*{sentence}"):
        encode_pairs([row(**values)], chat, 500, "error")


def test_long_rows() -> None:
    rows = [row(prompt="1+1=", chosen="2", rejected="3"), row(prompt="1+1=", chosen="2", rejected="2" * 40)]
    with pytest.raises(DataError, match="pairs.jsonl:3, rejected: the row has .* tokens .*max_length is 16"):
        encode_pairs(rows, BYTES, 16, "error")
    (kept,) = encode_pairs(rows, BYTES, 16, "drop")
    assert kept.chosen.row == 0
    cut = encode_pairs(rows, BYTES, 16, "truncate")
    assert len(cut) == 2 and len(cut[1].rejected.tokens) == 16
    with pytest.raises(DataError, match="all 1 rows are longer than max_length 16 and were dropped"):
        encode_pairs(rows[1:], BYTES, 16, "drop")
    same = row(prompt="1", chosen="2" * 30, rejected="2" * 40)
    with pytest.raises(DataError, match="the same 16 tokens.*raise max_length 16 if both were cut to it"):
        encode_pairs([same], BYTES, 16, "truncate")


def test_files_may_hold_conversations_without_a_prompt(tmp_path: Path) -> None:
    values = {"chosen": [user("a"), answer("b")], "rejected": [user("a"), answer("c")]}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(values) + "\n", encoding="utf-8")
    assert read_jsonl(str(path)) == [values]
    path.write_text(json.dumps({"chosen": "b"}) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"keys chosen has no known shape; legal shapes are .*chosen \+ rejected"):
        read_jsonl(str(path))
    with pytest.raises(DataError, match="has nothing to train on"):
        encode_examples([row(**values)], BYTES, 64, "error")
