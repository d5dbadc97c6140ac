from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizer_folders import CHATML, byte_level, metaspace
from transformers import AutoTokenizer

from areno_fn.contracts import spec as specs
from areno_fn.contracts.errors import CheckpointError, DataError
from areno_fn.world.tokenizer import Tokenizer, declared_eos, load
from areno_fn.world.tokenizer_bytes import BOS, EOS, PAD, ByteTokenizer
from areno_fn.world.tokenizer_export import export
from areno_fn.world.tokenizer_hf import load_hf

TEXTS = st.text()
IDS = st.lists(st.integers(0, 300), max_size=24)


def test_byte_tokenizer_values() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (259, 256, (257,))
    assert tokenizer.encode("1+é") == [49, 43, 0xC3, 0xA9]
    assert tokenizer.decode([BOS, 52, 54, EOS, PAD, 258, 300]) == "46"
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert tokenizer.encode("\ud800") == [63]
    assert isinstance(tokenizer, Tokenizer)


@given(TEXTS)
def test_byte_tokenizer_gives_every_text_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode(errors="replace").decode()


def test_byte_tokenizer_has_no_chat_template() -> None:
    with pytest.raises(DataError, match="byte tokenizer has no chat template"):
        ByteTokenizer().render([{"role": "user", "content": "x"}], True)


def test_extra_end_tokens_follow_the_tokenizers_own() -> None:
    assert load(specs.ByteTokenizer(), extra_eos=[10, 257, 10]).eos_ids == (257, 10)


@pytest.fixture(scope="module", params=[None, "qwen3", "llama"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    export(folder)
    if request.param is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": request.param, "vocab_size": 259}))
    return folder


@pytest.fixture(scope="module")
def reloaded(exported: Path) -> object:
    return AutoTokenizer.from_pretrained(str(exported), local_files_only=True)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@example(text="héllo \n wörld \u0301 e\u0301 😀")
@example(text="<|eos|>a<|bos|> <|pad|>")
@example(text=" don't  stop\r\n")
@example(text="\x00\u2028")
def test_exported_byte_tokenizer_encodes_alike_in_transformers(reloaded: object, text: str) -> None:
    ours = ByteTokenizer().encode(text)
    assert reloaded.encode(text, add_special_tokens=False) == ours
    assert reloaded(text)["input_ids"] == [BOS, *ours]


@given(ids=IDS)
@example(ids=[0xE2, BOS, 0x82, 0xAC])
@example(ids=[0xF0, 0x9F, 0x98, 0x41, 0xED, 0xA0, 0x80])
def test_exported_byte_tokenizer_decodes_alike_in_transformers(reloaded: object, ids: list[int]) -> None:
    theirs = reloaded.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ByteTokenizer().decode(ids) == theirs


def test_exported_byte_tokenizer_knows_its_special_tokens(reloaded: object) -> None:
    assert (reloaded.bos_token_id, reloaded.eos_token_id, reloaded.pad_token_id) == (BOS, EOS, PAD)
    assert len(reloaded) == ByteTokenizer().vocab_size


def test_exported_byte_tokenizer_loads_as_ours(exported: Path) -> None:
    tokenizer = load_hf(str(exported))
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (259, BOS, (EOS,))
    assert not tokenizer.chat
    assert tokenizer.encode("46é") == ByteTokenizer().encode("46é")
    assert tokenizer.decode([52, 54, EOS, 999]) == "46"


def test_hf_tokenizer_agrees_with_transformers(tmp_path: Path) -> None:
    folder = byte_level(tmp_path)
    ours, theirs = load_hf(str(folder)), AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    text = ours.render(turns, True)
    assert text == "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert ours.encode(text) == theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert ours.decode([*ours.encode("The capital"), 2]) == "The capital"


def test_bos_is_the_one_that_starts_texts_not_the_one_the_tokenizer_owns(tmp_path: Path) -> None:
    assert load_hf(str(byte_level(tmp_path / "owns"))).bos_id is None
    assert load_hf(str(byte_level(tmp_path / "uses", bos=True))).bos_id == 0
    assert load_hf(str(metaspace(tmp_path / "meta"))).bos_id == 0


def test_end_tokens_are_the_union_of_tokenizer_config_and_generation_config(tmp_path: Path) -> None:
    folder = byte_level(tmp_path)
    (folder / "config.json").write_text('{"eos_token_id": 2}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert declared_eos(folder) == (2, 0)
    assert load(specs.HFTokenizer(path=str(folder)), declared_eos(folder)).eos_ids == (2, 0)


def test_end_tokens_may_be_absent_and_must_be_integers(tmp_path: Path) -> None:
    assert declared_eos(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    assert declared_eos(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": "2"}')
    with pytest.raises(CheckpointError, match=r"config\.json: .*eos_token_id"):
        declared_eos(tmp_path)


def test_missing_folder_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        load_hf(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"holds no tokenizer; one of tokenizer\.json"):
        load_hf(str(tmp_path))


@pytest.mark.parametrize("keep", [0.5, 0.0])
def test_truncated_tokenizer_file(tmp_path: Path, keep: float) -> None:
    file = byte_level(tmp_path) / "tokenizer.json"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        load_hf(str(tmp_path))


CONFIG = {"model_type": "qwen3", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("config.json", "pad_token_id", "x"),
        ("config.json", "pad_token_id", [1]),
        ("config.json", "bos_token_id", [1]),
        ("config.json", "use_cache", "x"),
        ("config.json", "layer_types", []),
        ("config.json", "torch_dtype", "x"),
        ("config.json", "torch_dtype", []),
        ("config.json", "id2label", [1]),
        ("tokenizer_config.json", "tokenizer_class", 1),
        ("tokenizer_config.json", "model_max_length", "x"),
        ("tokenizer.json", "version", 1),
        ("tokenizer.json", "added_tokens", [1]),
        ("tokenizer.json", "model", {"type": "BPE", "vocab": {}, "merges": []}),
    ],
)
def test_a_file_whose_value_no_library_can_use_is_one_sentence(
    name: str, field: str, value: Any, tmp_path: Path
) -> None:
    file = byte_level(tmp_path) / name
    content = json.loads(file.read_text()) if file.exists() else CONFIG
    file.write_text(json.dumps({**content, field: value}))
    with pytest.raises(CheckpointError, match="transformers cannot read this tokenizer") as caught:
        load_hf(str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1 and str(tmp_path) in str(caught.value)


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = load_hf(str(byte_level(tmp_path, template=None)))
    assert not tokenizer.chat
    with pytest.raises(DataError, match="has no chat template"):
        tokenizer.render([{"role": "user", "content": "x"}], True)


def test_template_that_refuses(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}" + CHATML
    tokenizer = load_hf(str(byte_level(tmp_path, template=template)))
    with pytest.raises(DataError, match="refuses these messages .*roles must alternate"):
        tokenizer.render([{"role": "user", "content": "x"}], True)


@pytest.mark.parametrize("path", ["x" * 300, "a\0b"], ids=["long", "NUL"])
def test_a_path_that_can_be_none(path: str) -> None:
    with pytest.raises(CheckpointError, match="the tokenizer folder .* does not exist"):
        load_hf(path)


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0]['content'] + messages[0]['name'] }}", "{{ messages[0]['name'] // 0 }}", "{{ 'abc'.index('d') }}"],
)
def test_a_template_that_cannot_compute_with_a_message(tmp_path: Path, template: str) -> None:
    tokenizer = load_hf(str(byte_level(tmp_path, template=template)))
    with pytest.raises(DataError, match="the chat template in .* refuses these messages"):
        tokenizer.render([{"role": "user", "content": "x", "name": 3}], True)
