"""Reward models of a specification: which folders serve, which tokens they read, and that each is read once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reward_folders
import tokenizer_folders
import torch
from safetensors.torch import load_file, save_file

from areno_fn.contracts.batch import Drawn
from areno_fn.contracts.errors import ArenoError, CheckpointError, ModelError, RewardError
from areno_fn.contracts.spec import FunctionReward, ModelReward
from areno_fn.engine.reward_models import ModelJudge
from areno_fn.engine.rewards import Loaded, load_all, models_of, require_room
from areno_fn.world import tokenizer_export
from areno_fn.world.data_row import Row
from areno_fn.world.rewards import rehearse, score
from areno_fn.world.tokenizer import Tokenizer
from areno_fn.world.tokenizer_bytes import ByteTokenizer
from areno_fn.world.tokenizer_hf import load_hf
from areno_fn.world.tokenizer_same import same_tokens

ROWS = [Row({"prompt": f"{i}+1=", "answer": str(i + 1)}, "sums.jsonl", i + 1, "sums") for i in range(3)]
CPU = torch.device("cpu")
BYTES = ByteTokenizer()


def with_bytes(vocab_size: int = 259) -> Loaded:
    return Loaded(tokenizer=BYTES, vocab_size=vocab_size, device=CPU)


def made(spec: ModelReward, loaded: Loaded) -> tuple[Any, ModelJudge]:
    (reward,) = load_all([spec], loaded)
    assert isinstance(reward.function, ModelJudge)
    return reward, reward.function


def drawn(row: Row, completion: str, finished: bool = True) -> Drawn:
    tokens = [256, *BYTES.encode(row["prompt"]), *BYTES.encode(completion), *([257] if finished else [])]
    return Drawn(tokens=tuple(tokens), finished=finished)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "judge"
    reward_folders.write(path)
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "judge"))


def configure(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


# ------------------------------------------------------------------------------------------ what is read


def test_drawn_tokens_are_judged_as_transformers_judges_them(folder: Path) -> None:
    texts = ["1", "2 or so", "", "é\n"]
    rows = [ROWS[0], ROWS[1], ROWS[2], ROWS[0]]
    given = [drawn(row, text, finished=text != "") for row, text in zip(rows, texts, strict=True)]
    reward, judge = made(ModelReward(path=str(folder), weight=2.0), with_bytes())
    assert (reward.name, judge.model.as_drawn, judge.model.padding) == ("judge", True, 258)
    totals, parts = score([reward], rows, texts, drawn=given)
    expected = reward_folders.scores(reward_folders.peer(), [one.tokens for one in given], 258)
    assert parts["judge"] == pytest.approx(expected, abs=1e-5)
    assert totals == pytest.approx([2.0 * value for value in expected], abs=2e-5)


def test_shift_and_clip_come_in_this_order_and_the_weight_after_them(folder: Path) -> None:
    loaded = with_bytes()
    texts = ["1", "2", "three"]
    given = [drawn(row, text) for row, text in zip(ROWS, texts, strict=True)]
    plain, _ = made(ModelReward(path=str(folder)), loaded)
    raw, _ = score([plain], ROWS, texts, drawn=given)
    assert max(raw) - min(raw) > 0.1
    shift, clip = sum(raw) / 3, (max(raw) - min(raw)) / 4
    moved, _ = made(ModelReward(path=str(folder), shift=shift, clip=clip, weight=-3.0), loaded)
    totals, _ = score([moved], ROWS, texts, drawn=given)
    wanted = [-3.0 * min(max(value - shift, -clip), clip) for value in raw]
    assert totals == pytest.approx(wanted, abs=1e-5)
    assert -3.0 * clip in [pytest.approx(total) for total in totals], "a value was clipped"


def test_a_function_and_a_model_judge_together_each_its_own_data(folder: Path) -> None:
    rows = [*ROWS[:2], Row({"prompt": "9+1=", "answer": "10"}, "other.jsonl", 7, "other")]
    texts = ["1", "1", "10"]
    exact = FunctionReward(function="areno_fn.world.rewards:exact_match")
    rewards = load_all([exact, ModelReward(path=str(folder), data=["sums"])], with_bytes())
    given = [drawn(row, text) for row, text in zip(rows, texts, strict=True)]
    totals, parts = score(rewards, rows, texts, drawn=given)
    assert (len(parts["exact_match"]), len(parts["judge"])) == (3, 2)
    assert totals == pytest.approx([1 + parts["judge"][0], parts["judge"][1], 1.0])
    assert rehearse(rewards, rows).keys() == {"exact_match"}, "no model is read for a rehearsal"
    assert models_of(rewards)[0].in_memory, "it was read when it was asked"


def test_tokens_must_be_given(folder: Path) -> None:
    rewards = load_all([ModelReward(path=str(folder))], with_bytes())
    with pytest.raises(RewardError, match="judges tokens, but 0 were given of 3 completions; pass `drawn`"):
        score(rewards, ROWS, ["1", "2", "3"])


# ------------------------------------------------------------------------------------------ tokenizers


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    home = tmp_path_factory.mktemp("tokenizers")
    (home / "bytes").mkdir()
    tokenizer_export.export(home / "bytes")
    folders = {
        "bytes": home / "bytes",
        "plain": tokenizer_folders.byte_level(home / "plain", None),
        "chat": tokenizer_folders.byte_level(home / "chat"),
        "again": tokenizer_folders.byte_level(home / "again"),
        "bos": tokenizer_folders.byte_level(home / "bos", bos=True),
        "other end": tokenizer_folders.byte_level(home / "end", eos_token="<|endoftext|>"),
        "other chat": tokenizer_folders.byte_level(home / "other", tokenizer_folders.NO_END),
        "other words": tokenizer_folders.metaspace(home / "words"),
    }
    return {name: load_hf(str(path)) for name, path in folders.items()}


def test_tokenizers_are_the_same_when_every_text_and_conversation_has_the_same_tokens(
    tokenizers: dict[str, Tokenizer],
) -> None:
    assert same_tokens(BYTES, tokenizers["bytes"])
    assert same_tokens(tokenizers["chat"], tokenizers["again"])
    for one in tokenizers:
        for other in tokenizers:
            same = one == other or {one, other} == {"chat", "again"}
            assert same_tokens(tokenizers[one], tokenizers[other]) == same, (one, other)
    assert not any(same_tokens(BYTES, tokenizers[name]) for name in tokenizers if name != "bytes")


QUESTION = Row({"question": "What is the capital of France?"}, "rows.jsonl", 1)
MESSAGES = Row(
    {"prompt": [{"role": "system", "content": "You are"}, {"role": "user", "content": "12"}]}, "rows.jsonl", 2
)
TEXT = Row({"prompt": "The capital of"}, "rows.jsonl", 3)


@pytest.mark.parametrize(
    ("row", "finished", "name", "text"),
    [
        (
            QUESTION,
            True,
            "chat",
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nParis<|im_end|>\n",
        ),
        (
            QUESTION,
            False,
            "chat",
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nParis",
        ),
        (
            MESSAGES,
            True,
            "chat",
            "<|im_start|>system\nYou are<|im_end|>\n<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\nParis<|im_end|>\n",
        ),
        (TEXT, True, "chat", "The capital ofParis<|im_end|>"),
        (TEXT, False, "chat", "The capital ofParis"),
        (TEXT, True, "bos", "<|endoftext|>The capital ofParis<|im_end|>"),
        (QUESTION, True, "plain", "What is the capital of France?\nParis<|im_end|>"),
    ],
)
def test_where_tokenizers_differ_the_text_is_read_in_the_words_of_the_reward_model(
    row: Row, finished: bool, name: str, text: str, tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    """The whole text is encoded by transformers itself here, from what a person would write down."""
    reward_folders.write(tmp_path / "judge", vocab_size=300, pad_token_id=0)
    for file in Path(tokenizers[name].path).iterdir():
        shutil.copy(file, tmp_path / "judge")
    _, judge = made(ModelReward(path=str(tmp_path / "judge")), with_bytes())
    assert not judge.model.as_drawn
    ids = judge.model.read(row, "Paris", Drawn(tokens=(1, 2, 3), finished=finished))
    assert list(ids) == tokenizers[name].backend.encode(text, add_special_tokens=False)


def test_an_end_token_that_a_text_already_has_is_not_added(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    reward_folders.write(tmp_path, vocab_size=300)
    for file in Path(tokenizers["plain"].path).iterdir():
        shutil.copy(file, tmp_path)
    _, judge = made(ModelReward(path=str(tmp_path)), with_bytes())
    ids = judge.model.read(TEXT, "Paris<|im_end|>", Drawn(tokens=(1,), finished=True))
    assert list(ids).count(2) == 1


def test_tokens_that_the_reward_model_does_not_embed_are_read_as_text(folder: Path) -> None:
    assert made(ModelReward(path=str(folder)), with_bytes(259))[1].model.as_drawn
    assert not made(ModelReward(path=str(folder)), with_bytes(320))[1].model.as_drawn


def test_bytes_read_as_text_are_the_bytes_that_were_drawn(folder: Path) -> None:
    _, judge = made(ModelReward(path=str(folder)), with_bytes(320))
    for text, finished in (("46", True), ("é", False)):
        given = drawn(ROWS[0], text, finished)
        assert tuple(judge.model.read(ROWS[0], text, given)) == given.tokens


# ------------------------------------------------------------------------------------------ once


def test_one_folder_is_read_once_however_it_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder.parent)
    loaded = with_bytes()
    specs = [
        ModelReward(path=str(folder)),
        ModelReward(path=str(tmp_path / "link"), name="link", weight=2.0),
        ModelReward(path=f"./{folder.name}/", name="relative", clip=1.0),
        ModelReward(path=str(folder), name="half", dtype="bfloat16"),
    ]
    first = load_all(specs[:2], loaded)
    rewards = [*first, *load_all(specs[2:], loaded)]
    one, again, relative, half = [reward.function for reward in rewards]
    assert isinstance(one, ModelJudge) and isinstance(again, ModelJudge) and isinstance(relative, ModelJudge)
    assert one.model is again.model is relative.model
    assert len(models_of(rewards)) == 2, "in another dtype it is another model"
    assert one.model.load() is relative.model.load()
    assert isinstance(half, ModelJudge) and half.model.load().head.dtype == torch.bfloat16
    assert one.model.load().head.dtype == torch.float32


def test_two_rewards_of_one_name(folder: Path) -> None:
    with pytest.raises(RewardError, match="two rewards are called 'judge'; give each its own name"):
        load_all([ModelReward(path=str(folder)), ModelReward(path=str(folder))], with_bytes())


def test_the_content_is_what_the_folder_holds_and_not_where(folder: Path, copy: Path) -> None:
    def content(path: Path) -> str:
        return made(ModelReward(path=str(path)), with_bytes())[1].model.content()

    before = content(folder)
    assert content(copy) == before
    (copy / "README.md").write_text("words")
    assert content(copy) == before
    file = copy / "model.safetensors"
    tensors = load_file(file)
    tensors["score.weight"][0, 3] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    after = content(copy)
    assert after != before
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ messages }}"}))
    assert content(copy) not in (before, after)


# ------------------------------------------------------------------------------------------ refusals


def without_head(path: Path) -> None:
    file = path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != "score.weight"}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda path: shutil.rmtree(path), CheckpointError, "judge is not there; a Hugging Face folder is needed"),
        (
            lambda path: configure(path, architectures=["LlamaForCausalLM"]),
            ModelError,
            r"judge: architectures is \['LlamaForCausalLM'\], but a model with one number a text is a ...ForSequenceClass",
        ),
        (
            lambda path: configure(path, id2label={"0": "bad", "1": "good"}),
            ModelError,
            "judge: the model has 2 labels, but one that gives a text one number has 1",
        ),
        (
            lambda path: configure(path, model_type="bert", architectures=["BertForSequenceClassification"]),
            ModelError,
            "judge: model_type is 'bert', but the families known here are llama, qwen2, qwen3",
        ),
        (without_head, CheckpointError, "its tensors are not those of the model: 'score.weight' is missing"),
        (
            lambda path: configure(path, vocab_size=100),
            CheckpointError,
            r"'model.embed_tokens.weight' is float32 \[259, 16\], declared \[100, 16\]",
        ),
        (
            lambda path: [file.unlink() for file in path.glob("tokenizer*")],
            CheckpointError,
            "judge holds no tokenizer; one of",
        ),
        (
            lambda path: tokenizer_folders.byte_level(path),
            ModelError,
            r"judge: its tokenizer has 300 tokens, but the model embeds 259; put the tokenizer there that",
        ),
    ],
)
def test_folders_that_are_no_reward_model(
    copy: Path, change: Callable[[Path], object], kind: type[ArenoError], said: str
) -> None:
    change(copy)
    with pytest.raises(kind, match=said) as caught:
        load_all([ModelReward(path=str(copy))], with_bytes())
    assert "\n" not in str(caught.value)


def test_prompts_that_leave_no_room_are_refused(folder: Path) -> None:
    long = Row({"prompt": "1" * 50}, "rows.jsonl", 9, "sums")
    rewards = load_all([ModelReward(path=str(folder), data=["sums"])], with_bytes())
    prompts = [[256, *BYTES.encode(row["prompt"])] for row in (ROWS[0], long)]
    require_room(rewards, [ROWS[0], long], prompts, 13)
    with pytest.raises(
        RewardError,
        match=r"judge has 64 positions, but the prompt of rows.jsonl:9 and a completion need 65; shorten the prompt",
    ):
        require_room(rewards, [ROWS[0], long], prompts, 14)
    other = Row(dict(long), "rows.jsonl", 9, "other")
    require_room(rewards, [other], prompts[1:], 14)


def test_prompts_in_other_words_are_measured_in_those(folder: Path) -> None:
    rewards = load_all([ModelReward(path=str(folder))], with_bytes(320))
    require_room(rewards, [Row({"prompt": "1" * 62}, "rows.jsonl", 1)], [[1]], 14)
    with pytest.raises(RewardError, match="the prompt of rows.jsonl:2 and a completion need 65"):
        require_room(rewards, [Row({"prompt": "1" * 63}, "rows.jsonl", 2)], [[1]], 14)
    with pytest.raises(
        RewardError, match="cannot read a prompt: rows.jsonl:3: the byte tokenizer|has no chat template"
    ):
        require_room(rewards, [Row({"prompt": [{"role": "user", "content": "x"}]}, "rows.jsonl", 3)], [[1]], 14)


def test_a_completion_in_other_words_that_is_too_long_names_its_row(folder: Path) -> None:
    _, judge = made(ModelReward(path=str(folder)), with_bytes(320))
    with pytest.raises(RewardError, match=r"has 64 positions, but a completion of sums.jsonl:1 and its prompt have 66"):
        judge.judge(ROWS[:1], ["2" * 60], [Drawn(tokens=(1,), finished=True)])
