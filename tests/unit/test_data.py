from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from areno_fn.contracts.errors import DataError
from areno_fn.contracts.spec import ArithmeticData, JsonlData
from areno_fn.world.data import read, read_all, read_jsonl
from areno_fn.world.data_row import Row
from areno_fn.world.data_schema import messages, prompt, schema, text

TURN = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "yo"}


def write(folder: Path, *lines: str | dict[str, Any]) -> JsonlData:
    path = folder / "rows.jsonl"
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), encoding="utf-8"
    )
    return JsonlData(path=str(path))


def test_rows_keep_their_values_and_their_place(tmp_path: Path) -> None:
    spec = write(tmp_path, {"prompt": "a", "response": "é", "id": 7}, "", {"text": "b\u2028c"})
    rows = read(spec)
    assert rows == [{"prompt": "a", "response": "é", "id": 7}, {"text": "b\u2028c"}]
    assert [row.where for row in rows] == [f"{spec.path}:1", f"{spec.path}:3"]


def test_byte_order_mark_and_carriage_returns_are_no_part_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "dos.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}')
    assert [(dict(row), row.line) for row in read(JsonlData(path=str(path)))] == [
        ({"text": "a"}, 1),
        ({"text": "b"}, 3),
    ]


def test_several_sources_are_read_one_after_the_other(tmp_path: Path) -> None:
    rows = read_all([write(tmp_path, {"text": "a"}), ArithmeticData(count=2)])
    assert [row.line for row in rows] == [1, 1, 2]
    assert rows[1].file == "arithmetic(2 digits, train, seed 0)"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a"', r"rows\.jsonl:2: not valid JSON"),
        ('{"text": "\\ud800"}', r"rows\.jsonl:2: not valid JSON"),
        (
            '{"text": NaN}',
            r"rows\.jsonl:2: not valid JSON .*; JSON has no NaN and no Infinity; write null, or leave the key out$",
        ),
        ('{"text": [1, -Infinity]}', r"rows\.jsonl:2: .*; JSON has no NaN and no Infinity"),
        ('{"text": "NaN: Infinity", a}', r"rows\.jsonl:2: .*; each line is one JSON object$"),
        ("{", r"rows\.jsonl:2: .*; the object goes on in the next line; each line is one JSON object, whole$"),
        ('["a"]', r"rows\.jsonl:2: a row must be a JSON object, received list"),
        ("7", r"rows\.jsonl:2: a row must be a JSON object, received int"),
        (
            '{"question_text": "a", "answer": "b"}',
            r"rows\.jsonl:2: .*keys answer, question_text has no known shape; .*messages",
        ),
        ("{}", r"rows\.jsonl:2: a row with the keys none"),
        ('{"response": "b"}', r"rows\.jsonl:2: .*no known shape"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        read(write(tmp_path, {"text": "fine"}, line))
    assert "\n" not in str(caught.value)


def test_a_file_in_another_encoding_is_told(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n', encoding="utf-16")
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: not valid JSON .*; the file seems to be UTF-16; write it in UTF-8$"
    ):
        read(JsonlData(path=str(tmp_path / "rows.jsonl")))


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl cannot be read \(No such file or directory\)"):
        read(JsonlData(path=str(tmp_path / "nothing.jsonl")))
    with pytest.raises(DataError, match=r"rows\.jsonl is empty"):
        read(write(tmp_path, "", "  "))
    with pytest.raises(DataError, match="cannot be read"):
        read(JsonlData(path=str(tmp_path)))
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe\.jsonl cannot be read \(it is no regular file\)"):
        read(JsonlData(path=str(tmp_path / "pipe.jsonl")))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"messages": [], "prompt": "", "response": ""}, ("messages",)),
        ({"prompt": "", "response": "", "answer": ""}, ("prompt", "response")),
        ({"question": "", "answer": "", "text": ""}, ("question", "answer")),
        ({"instruction": "", "input": "", "output": "", "text": ""}, ("instruction", "output")),
        ({"text": "", "prompt": ""}, ("text",)),
    ],
)
def test_the_first_complete_schema_decides(values: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert schema(Row(values, "f", 1)) == expected


def test_a_prompt_alone_is_no_training_row() -> None:
    with pytest.raises(DataError, match=r"f:4: a row with the keys answer, prompt has nothing to train on"):
        schema(Row({"prompt": "a", "answer": "b"}, "f", 4))


def test_prompts_by_key() -> None:
    assert prompt(Row({"prompt": "12+34="}, "f", 1)).text == "12+34="
    assert prompt(Row({"prompt": "12+34="}, "f", 1)).messages is None
    assert prompt(Row({"prompt": [TURN]}, "f", 1)).messages == (TURN,)
    asked = prompt(Row({"question": "Why?", "answer": 3}, "f", 1))
    assert (asked.text, asked.messages) == ("Why?\n", ({"role": "user", "content": "Why?"},))
    told = prompt(Row({"instruction": "Add.", "input": "1 2", "output": "3"}, "f", 1))
    assert (told.text, told.messages) == ("Add.\n1 2\n", ({"role": "user", "content": "Add.\n1 2"},))
    assert prompt(Row({"instruction": "Sing.", "input": "", "output": "la"}, "f", 1)).text == "Sing.\n"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"text": "a"}, "has no prompt"),
        ({"prompt": 3}, "'prompt' must be text, received int"),
        ({"prompt": []}, "'prompt' must be a list of at least one message, received list of length 0"),
        ({"prompt": ["hi"]}, r"prompt\[0\] must be an object with 'role' and 'content' in text"),
        ({"prompt": [TURN, {"role": "user", "content": None}]}, r"prompt\[1\] must be an object"),
        ({"prompt": [REPLY, TURN]}, "prompt begins with the assistant"),
        ({"prompt": [TURN, REPLY]}, "prompt ends with the assistant's turn"),
        ({"instruction": "a", "input": 3, "output": "b"}, "'input' must be text, received int"),
    ],
)
def test_prompts_that_cannot_be_used(values: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=rf"^f:9: .*{said}"):
        prompt(Row(values, "f", 9))


def test_fields_of_the_wrong_type() -> None:
    with pytest.raises(DataError, match="f:1: 'answer' must be text, received float"):
        text(Row({"answer": 1.5}, "f", 1), "answer")
    with pytest.raises(DataError, match="f:1: 'messages' must be a list of at least one message, received str"):
        messages(Row({"messages": "hi"}, "f", 1), "messages")


@pytest.mark.parametrize("path", ["x" * 300, "a\0b"], ids=["long", "NUL"])
def test_a_path_that_can_be_none(path: str) -> None:
    with pytest.raises(DataError, match="cannot be read .*; give the path of a JSONL file"):
        read_jsonl(path)


def test_columns_are_renamed(tmp_path: Path) -> None:
    spec = write(tmp_path, {"ask": "a", "solution": "b", "id": 1})
    spec = structs.replace(spec, columns={"question": "ask", "answer": "solution", "gold": "solution"})
    assert read(spec) == [{"question": "a", "answer": "b", "gold": "b", "id": 1}]


def test_two_columns_may_change_places(tmp_path: Path) -> None:
    spec = write(tmp_path, {"prompt": "a", "response": "b"})
    assert read(structs.replace(spec, columns={"prompt": "response", "response": "prompt"})) == [
        {"prompt": "b", "response": "a"}
    ]


def test_a_column_takes_the_place_of_no_other(tmp_path: Path) -> None:
    spec = write(tmp_path, {"question": "a", "prompt": "b", "answer": "c"})
    with pytest.raises(DataError) as caught:
        read(structs.replace(spec, columns={"question": "prompt"}))
    assert str(caught.value) == (
        f"{spec.path}:1: `columns` would put 'prompt' in the place of 'question', which the row has too; it is written "
        "{ wanted = 'theirs' }: turn it round, or rename 'question' too to keep it"
    )
    assert read(structs.replace(spec, columns={"prompt": "question", "written": "prompt"})) == [
        {"prompt": "a", "written": "b", "answer": "c"}
    ]
    assert read(structs.replace(spec, columns={"prompt": "prompt"})) == [
        {"question": "a", "prompt": "b", "answer": "c"}
    ]


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    spec = write(tmp_path, {"ask": "a"}, {"asked": "a", "id": 1})
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: there is no 'ask' for `columns` to rename; the row has asked, id"
    ):
        read(structs.replace(spec, columns={"prompt": "ask"}))


def test_behind_the_limit_nothing_is_read(tmp_path: Path) -> None:
    spec = structs.replace(write(tmp_path, {"text": "a"}, "", {"text": "b"}, "no JSON"), limit=2)
    assert read(spec) == [{"text": "a"}, {"text": "b"}]


def test_rows_say_which_data_set_they_are_from(tmp_path: Path) -> None:
    sums = ArithmeticData(count=1)
    rows = read_all(
        [sums, structs.replace(sums, name="sums"), structs.replace(write(tmp_path, {"text": "a"}), name="b.c")]
    )
    assert [row.source for row in rows] == ["0", "sums", "b.c"]


def test_a_row_that_fits_nothing_is_shown_and_a_long_one_cut(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'`columns` renames keys; the row is \{"ask": "why\?"\}$'):
        read(write(tmp_path, {"ask": "why?"}))
    with pytest.raises(DataError, match=r'the row is \{"ask": "wwww') as caught:
        read(write(tmp_path, {"ask": "w" * 10**6}))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("role", ["asistant", "Assistant", "human", "gpt", ""])
def test_roles_are_checked(role: str) -> None:
    row = Row({"messages": [TURN, {"role": role, "content": "yo"}]}, "f", 3)
    with pytest.raises(
        DataError, match=rf"f:3: messages\[1\] has the role '{role}'; roles are system, developer, user"
    ):
        messages(row, "messages")


def test_every_role_may_speak() -> None:
    talk = [{"role": role, "content": "x"} for role in ("system", "developer", "user", "assistant", "tool")]
    assert len(messages(Row({"messages": talk}, "f", 3), "messages")) == 5
