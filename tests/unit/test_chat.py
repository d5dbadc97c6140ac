from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_folders import ASKS_OTHERWISE, CHATML, LAST_TURN_DIFFERS, NO_END, byte_level
from transformers import AutoTokenizer

from areno_fn.contracts.errors import DataError
from areno_fn.world.chat import encode_conversation
from areno_fn.world.data_row import Row
from areno_fn.world.examples import encode_examples, encode_prompts
from areno_fn.world.tokenizer_hf import HFTokenizer, load_hf

END = 2
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def turns(*contents: str, first: str = "user") -> list[dict[str, Any]]:
    """User and assistant in turn."""
    roles = ["user", "assistant"] if first == "user" else ["system", "user", "assistant", "user", "assistant"]
    return [{"role": roles[i % len(roles)], "content": content} for i, content in enumerate(contents)]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return load_hf(str(byte_level(tmp_path_factory.mktemp("chatml"))))


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(str(byte_level(tmp_path_factory.mktemp("marked"), template=MARKED)))


def load(folder: Path, template: str) -> HFTokenizer:
    return load_hf(str(byte_level(folder, template=template)))


def trained_text(tokenizer: HFTokenizer, messages: list[dict[str, Any]], first: int = 0) -> list[str]:
    """The trained stretches, special tokens shown."""
    ids, trained = encode_conversation(messages, tokenizer, "f:1", first)
    stretches: list[list[int]] = []
    for index, token in enumerate(ids):
        if trained[index]:
            if index == 0 or not trained[index - 1]:
                stretches.append([])
            stretches[-1].append(token)
    return [tokenizer.backend.decode(stretch) for stretch in stretches]


CONTENTS = st.text(st.sampled_from(list("the when12\n  é?😀.")), min_size=1, max_size=16)


@given(contents=st.lists(CONTENTS, min_size=2, max_size=6))
def test_tokens_and_mask_are_those_of_a_template_with_generation_marks(
    chatml: HFTokenizer, marked: Any, contents: list[str]
) -> None:
    # a line end at the start of a reply may be one token with the template's own; see the next test
    messages = turns(*(content.lstrip() + "." for content in contents))
    reference = marked.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, trained = encode_conversation(messages, chatml, "f:1")
    assert ids == reference["input_ids"]
    assert [int(flag) for flag in trained] == reference["assistant_masks"]


@given(contents=st.lists(CONTENTS, min_size=2, max_size=2))
def test_the_prompt_of_a_conversation_is_what_generation_sees(chatml: HFTokenizer, contents: list[str]) -> None:
    messages = turns(*contents)
    asked = chatml.backend.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    ids, trained = encode_conversation(messages, chatml, "f:1")
    assert ids[: len(asked)] == asked
    assert trained.index(True) == len(asked)
    assert chatml.backend.decode(ids) == chatml.render(messages, False)
    (prompt,) = encode_prompts([Row({"prompt": messages[:1]}, "f", 1)], chatml, 999)
    assert list(prompt) == asked


def test_every_assistant_turn_is_trained_with_its_end_token(chatml: HFTokenizer) -> None:
    messages = turns("Be brief.", "hi", "yo", "and?", "bye", first="system")
    assert trained_text(chatml, messages) == ["yo<|im_end|>", "bye<|im_end|>"]


def test_only_the_response_of_a_prompt_in_messages_is_trained(chatml: HFTokenizer) -> None:
    messages = turns("hi", "yo", "and?", "bye")
    assert trained_text(chatml, messages, first=3) == ["bye<|im_end|>"]
    (found,) = encode_examples([Row({"prompt": messages[:3], "response": "bye"}, "f", 1)], chatml, 99, "error")
    assert found.tokens == tuple(chatml.encode(chatml.render(messages, False)))
    assert [token for token, flag in zip(found.tokens, found.trained, strict=True) if flag] == [
        *chatml.encode("bye"),
        END,
    ]


def test_a_prompt_in_messages_is_asked_as_inference_asks_it(chatml: HFTokenizer) -> None:
    """Whoever spoke before: the tokens are those that transformers gives the whole list, up to where the assistant speaks."""
    asked = [turns("hi"), turns("Be brief.", "hi", "yo", "and?", first="system"), turns("12", "34", "46")]
    asked.append([*turns("12"), {"role": "tool", "content": "34", "name": "sum"}])
    prompts = encode_prompts([Row({"prompt": messages}, "f", 1) for messages in asked], chatml, 999)
    for messages, prompt in zip(asked, prompts, strict=True):
        wanted = chatml.backend.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(prompt) == wanted
        assert chatml.backend.decode(prompt).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_a_conversation_may_end_with_the_user(chatml: HFTokenizer) -> None:
    messages = turns("hi", "yo", "more")
    assert trained_text(chatml, messages) == ["yo<|im_end|>"]
    assert encode_conversation(messages, chatml, "f:1")[0] == chatml.encode(chatml.render(messages, False))


def test_one_end_token_where_the_template_writes_one(chatml: HFTokenizer) -> None:
    ids, _ = encode_conversation(turns("hi", "yo"), chatml, "f:1")
    assert ids.count(END) == 2  # the user's and the assistant's
    assert chatml.backend.decode(ids[-2:]) == "<|im_end|>\n"


def test_an_end_token_where_the_template_writes_none(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, NO_END)
    ids, trained = encode_conversation(turns("hi", "yo", "and", "bye"), tokenizer, "f:1")
    assert trained_text(tokenizer, turns("hi", "yo", "and", "bye")) == ["yo\n", "bye\n<|im_end|>"]
    assert ids.count(END) == 1
    assert (ids[-1], trained[-1]) == (END, True)
    user_last, _ = encode_conversation(turns("hi", "yo", "and"), tokenizer, "f:1")
    assert END not in user_last


def test_any_end_token_of_the_set_closes_a_turn(tmp_path: Path) -> None:
    folder = byte_level(tmp_path, template=CHATML, eos_token="<|endoftext|>")
    ids, trained = encode_conversation(turns("hi", "yo"), load_hf(str(folder), extra_eos=[2]), "f:1")
    assert ids.count(0) == 0
    assert [token for token, flag in zip(ids, trained, strict=True) if flag][-1] == END
    # without the configuration's end token, the tokenizer's own must follow
    ids, trained = encode_conversation(turns("hi", "yo"), load_hf(str(folder)), "f:1")
    assert (ids[-1], trained[-1]) == (0, True)


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (("hi", "yo"), ["<think>\n\n</think>\n\nyo<|im_end|>"]),
        (("hi", "yo", "and"), ["yo<|im_end|>"]),
        (("hi", "yo", "and", "bye"), ["yo<|im_end|>", "<think>\n\n</think>\n\nbye<|im_end|>"]),
    ],
)
def test_a_template_that_writes_the_last_turn_differently(
    tmp_path: Path, contents: tuple[str, ...], expected: list[str]
) -> None:
    tokenizer = load(tmp_path, LAST_TURN_DIFFERS)
    assert trained_text(tokenizer, turns(*contents)) == expected
    ids, _ = encode_conversation(turns(*contents), tokenizer, "f:1")
    assert tokenizer.backend.decode(ids) == tokenizer.render(turns(*contents), False)


def test_a_turn_whose_end_cannot_be_found(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, LAST_TURN_DIFFERS.replace("<|im_end|>", ""))
    with pytest.raises(DataError, match=r"^f:1: the chat template ends messages\[1\] with no end token \(\[2\]\)"):
        encode_conversation(turns("hi", "yo", "and", "bye"), tokenizer, "f:1")


def test_a_template_that_asks_otherwise_than_it_writes(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, ASKS_OTHERWISE)
    with pytest.raises(
        DataError, match=r"^f:1: the chat template writes messages\[1\] .* differently .*<think>"
    ) as caught:
        encode_conversation(turns("hi", "yo"), tokenizer, "f:1")
    assert "\n" not in str(caught.value)


def test_a_template_that_refuses_is_reported_with_the_row(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "{{ raise_exception('no system turn here') }}")
    with pytest.raises(
        DataError, match=r"^f:1: the chat template in .* refuses these messages \(no system turn here\)"
    ):
        encode_conversation(turns("hi", "yo"), tokenizer, "f:1")


def test_no_assistant_turn(chatml: HFTokenizer) -> None:
    with pytest.raises(DataError, match="^f:1: no message has the role 'assistant'"):
        encode_conversation(turns("hi"), chatml, "f:1")
