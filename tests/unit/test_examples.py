from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizer_folders import BOS_CHATML, byte_level, metaspace

from areno_fn.contracts.batch import Example
from areno_fn.contracts.errors import DataError
from areno_fn.contracts.spec import ArithmeticData
from areno_fn.world.arithmetic import rows as arithmetic_rows
from areno_fn.world.data_row import Row
from areno_fn.world.examples import encode_examples, encode_prompts, plain_questions
from areno_fn.world.tokenizer import Tokenizer
from areno_fn.world.tokenizer_bytes import BOS, EOS, ByteTokenizer
from areno_fn.world.tokenizer_hf import HFTokenizer, load_hf


@attrs.frozen(kw_only=True)
class Digits:
    """Every digit of a text is an id, so that a test can write tokens down."""

    eos_ids: tuple[int, ...] = (9,)
    bos_id: int | None = None
    vocab_size: int = 200
    chat: bool = False

    def encode(self, text: str) -> list[int]:
        return [int(digit) for digit in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(str(i) for i in ids)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        raise DataError("no chat template")


def row(line: int = 1, /, **values: Any) -> Row:
    return Row(values, "rows.jsonl", line)


def encode(row: Row, tokenizer: Tokenizer, max_length: int = 64) -> Example:
    (found,) = encode_examples([row], tokenizer, max_length, "error")
    return found


def shifted_labels(example: Example) -> list[int]:
    return [token if trained else -100 for token, trained in zip(example.tokens, example.trained, strict=True)][1:]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return load_hf(str(byte_level(tmp_path_factory.mktemp("plain"), template=None)))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return load_hf(str(byte_level(tmp_path_factory.mktemp("chatty"))))


def test_byte_rows_by_hand() -> None:
    found = encode(row(prompt="12+34=", response="46"), ByteTokenizer())
    assert found.tokens == (BOS, 49, 50, 43, 51, 52, 61, 52, 54, EOS)
    assert found.trained == (False,) * 7 + (True,) * 3
    assert encode_prompts([row(prompt="12+34=")], ByteTokenizer(), 7) == (found.tokens[:7],)


def test_D1_the_first_response_token_is_trained() -> None:
    found = encode(row(prompt="12", response="34"), Digits(eos_ids=(4,)))
    assert found.tokens == (1, 2, 3, 4)
    assert shifted_labels(found) == [-100, 3, 4]


def test_D2_the_mask_comes_from_position_not_from_the_value_of_a_token() -> None:
    # 2 is end and padding token at once, and stands in the prompt too
    found = encode(row(prompt="272", response="5"), Digits(eos_ids=(2,)))
    assert found.tokens == (2, 7, 2, 5, 2)
    assert found.trained == (False, False, False, True, True)
    assert encode(row(prompt="7", response="522"), Digits(eos_ids=(2,))).trained == (False, True, True, True)


def test_D3_any_of_several_end_tokens_closes_a_response() -> None:
    tokenizer = Digits(eos_ids=(1, 6))
    assert encode(row(prompt="7", response="56"), tokenizer).tokens == (7, 5, 6)
    assert encode(row(prompt="7", response="51"), tokenizer).tokens == (7, 5, 1)
    assert encode(row(prompt="7", response="5"), tokenizer).tokens == (7, 5, 1)
    assert encode(row(text="756"), tokenizer).tokens == (7, 5, 6)


def test_D6_one_bos_where_there_is_one_and_none_where_there_is_none() -> None:
    assert encode(row(prompt="12", response="3"), Digits(bos_id=8)).tokens == (8, 1, 2, 3, 9)
    assert encode(row(prompt="812", response="3"), Digits(bos_id=8)).tokens == (8, 1, 2, 3, 9)
    assert encode(row(text="12"), Digits(bos_id=8)).tokens == (8, 1, 2, 9)
    assert encode(row(prompt="12", response="3"), Digits()).tokens == (1, 2, 3, 9)
    assert encode_prompts([row(prompt="12"), row(prompt="812")], Digits(bos_id=8), 9) == ((8, 1, 2), (8, 1, 2))
    with pytest.raises(DataError, match="rows.jsonl:1: the response holds the BOS token 8"):
        encode(row(prompt="12", response="83"), Digits(bos_id=8))


def test_D6_a_template_with_bos_and_a_tokenizer_with_bos_make_one(tmp_path: Path) -> None:
    tokenizer = load_hf(str(byte_level(tmp_path, template=BOS_CHATML, bos=True)))
    assert tokenizer.bos_id == 0
    turns = [{"role": "user", "content": "hi"}]
    found = encode(row(prompt=turns, response="yo"), tokenizer)
    assert found.tokens[0] == 0
    assert found.tokens.count(0) == 1
    (prompt,) = encode_prompts([row(prompt=turns)], tokenizer, 64)
    assert prompt == found.tokens[: len(prompt)]
    plain = encode(row(prompt="hi", response="yo"), tokenizer)
    assert (plain.tokens[0], plain.tokens.count(0)) == (0, 1)


def test_D8_each_row_is_cut_on_the_right() -> None:
    rows = [row(1, prompt="1", response="2"), row(2, prompt="12", response="34")]
    short, long = encode_examples(rows, Digits(), 4, "truncate")
    assert short.tokens == (1, 2, 9)
    assert long.tokens == (1, 2, 3, 4)
    assert long.trained == (False, False, True, True)


def test_D8_a_response_never_disappears_silently() -> None:
    said = (
        r"rows.jsonl:3: the 4 tokens before the response fill max_length 4, .* shorten the prompt or raise max_length"
    )
    with pytest.raises(DataError, match=said):
        encode_examples([row(3, prompt="1234", response="5")], Digits(), 4, "truncate")


def test_overlong_rows_are_refused_by_place_and_lengths() -> None:
    said = r"rows.jsonl:7: the row has 5 tokens \(3 of them trained\), but max_length is 4"
    with pytest.raises(DataError, match=said):
        encode_examples([row(prompt="1", response="2"), row(7, prompt="12", response="34")], Digits(), 4, "error")


def test_dropped_rows_can_be_counted_by_what_is_left() -> None:
    rows = [row(1, prompt="12", response="34"), row(2, prompt="1", response="2"), row(3, text="123456")]
    assert [(found.row, found.tokens) for found in encode_examples(rows, Digits(), 4, "drop")] == [(1, (1, 2, 9))]
    with pytest.raises(DataError, match="all 3 rows are longer than max_length 2"):
        encode_examples(rows, Digits(), 2, "drop")


def test_every_token_of_a_text_but_the_first_is_trained() -> None:
    found = encode(row(text="123"), Digits())
    assert found.tokens == (1, 2, 3, 9)
    assert found.trained == (False, True, True, True)
    assert encode(row(text="ab"), ByteTokenizer()).tokens == (BOS, 97, 98, EOS)


def test_nothing_to_train_on() -> None:
    with pytest.raises(DataError, match="rows.jsonl:1: the row has no token to train on"):
        encode(row(text=""), Digits())
    with pytest.raises(DataError, match="rows.jsonl:5: a row with the keys prompt has nothing to train on"):
        encode(row(5, prompt="1"), Digits())


def test_a_document_without_prompt_does_not_train_its_first_token() -> None:
    assert encode(row(prompt="", response="12"), Digits()).trained == (False, True, True)
    assert encode(row(prompt="", response="12"), Digits(bos_id=8)).trained == (False, True, True, True)


def test_no_end_token() -> None:
    with pytest.raises(DataError, match="rows.jsonl:1: the tokenizer has no end token"):
        encode(row(prompt="1", response="2"), Digits(eos_ids=()))


def test_questions_are_a_turn_where_there_is_a_template_and_a_line_elsewhere(
    plain: HFTokenizer, chatty: HFTokenizer
) -> None:
    for values in ({"question": "Why?", "answer": "So."}, {"instruction": "Why?", "input": "", "output": "So."}):
        chat = encode(row(**values), chatty)
        turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
        assert chat == encode(row(messages=turns), chatty)
        text = encode(row(**values), plain)
        assert text == encode(row(prompt="Why?\n", response="So."), plain)


def test_messages_need_a_template() -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    said = "it holds messages, but the tokenizer has no chat template; give"
    for held in (row(prompt=turns[:1], response="yo"), row(messages=turns)):
        with pytest.raises(DataError, match=f"^rows.jsonl:1: {said} 'prompt' and 'response' as text$"):
            encode(held, ByteTokenizer())
    with pytest.raises(DataError, match=f"^rows.jsonl:2: {said} 'prompt' as text$"):
        encode_prompts([row(2, prompt=turns[:1])], ByteTokenizer(), 64)


def test_questions_that_become_plain_texts_are_counted(plain: HFTokenizer, chatty: HFTokenizer) -> None:
    rows = [
        row(question="a", answer="b"),
        row(instruction="a", chosen="b", rejected="c"),
        row(prompt="a", question="b", response="c"),
        row(question="a", text="b"),
        row(text="a"),
    ]
    assert plain_questions(rows, plain) == plain_questions(rows, ByteTokenizer()) == 3
    assert plain_questions(rows, plain, trained=True) == 2, "the text is trained on, and not the question"
    assert plain_questions(rows, chatty) == 0


def test_prompts_that_do_not_fit_the_context() -> None:
    said = r"rows.jsonl:2: the prompt has 4 tokens, but the context leaves 3 beside the response"
    with pytest.raises(DataError, match=said):
        encode_prompts([row(1, prompt="123"), row(2, prompt="1234")], Digits(), 3)
    with pytest.raises(DataError, match="rows.jsonl:1: the prompt has no tokens"):
        encode_prompts([row(prompt="")], Digits(), 3)


PIECES = st.text(st.sampled_from(list("the when12\n  é?😀")), max_size=12)


@given(prompt=PIECES, response=PIECES)
@example(prompt="Why?\n", response="\nSo.")  # two line ends would be one token
@example(prompt="the ", response="the")
@example(prompt="th", response="e")
@example(prompt="é", response="\u0301")
def test_a_response_does_not_change_the_tokens_of_its_prompt(plain: HFTokenizer, prompt: str, response: str) -> None:
    (alone,) = encode_prompts([row(prompt=f"p{prompt}")], plain, 999)
    found = encode(row(prompt=f"p{prompt}", response=response), plain, 999)
    assert found.tokens[: len(alone)] == alone
    assert found.trained == (False,) * len(alone) + (True,) * (len(found.tokens) - len(alone))
    assert plain.decode(found.tokens) == f"p{prompt}{response}"
    assert found.tokens[-1] == 2


def test_a_tokenizer_that_puts_a_space_before_a_text_puts_none_before_a_response(tmp_path: Path) -> None:
    tokenizer = load_hf(str(metaspace(tmp_path)))
    found = encode(row(prompt="12+34=", response="46"), tokenizer)
    assert tokenizer.decode(found.tokens) == "12+34=46"
    whole = tokenizer.backend("12+34=46")["input_ids"]
    assert found.tokens == (*whole, 1)
    assert encode_prompts([row(prompt="12+34=")], tokenizer, 64)[0] == tuple(tokenizer.backend("12+34=")["input_ids"])


def test_a_cut_inside_a_token_that_cannot_be_kept(tmp_path: Path) -> None:
    tokenizer = load_hf(str(metaspace(tmp_path)))
    assert tokenizer.encode("the sum")[:-1] + tokenizer.encode("the su")[-2:] == tokenizer.encode("the su")
    with pytest.raises(DataError, match="rows.jsonl:1: a token reaches from the prompt into the response"):
        encode(row(prompt="the su", response="m is 46"), tokenizer)


def test_arithmetic_rows_train_the_digits_and_the_end() -> None:
    rows = arithmetic_rows(ArithmeticData(count=40))
    tokenizer = ByteTokenizer()
    prompts = encode_prompts(rows, tokenizer, 16)
    for found, prompt, source in zip(encode_examples(rows, tokenizer, 32, "error"), prompts, rows, strict=True):
        assert found.tokens[: len(prompt)] == prompt
        assert tokenizer.decode(found.tokens) == source["prompt"] + source["answer"]
        assert sum(found.trained) == len(source["answer"]) + 1
