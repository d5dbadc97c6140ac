"""Prompts that are longer than an encoder's limit are told before a run, and the lengths are those at which words stop counting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flow_families
import flow_pipelines
import msgspec
import pytest

from areno_fn import tree
from areno_fn.contracts.media import Request
from areno_fn.contracts.spec import RunSpec
from areno_fn.engine.plan import plan
from areno_fn.engine.prompt_lengths import cut_prompts
from areno_fn.engine.prompted_medium import PromptedPictures
from areno_fn.engine.session import describe, run
from areno_fn.world.data_row import Row

ONE_ENCODER = ("Flux.2 dev", "Flux.2 Klein", "Qwen-Image", "Z-Image", "Wan 2.1", "Wan 2.2 A14B", "LTX-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pipelines")
    flow_pipelines.sd3(found / "sd3")
    flow_pipelines.flux(found / "flux")
    return found


@pytest.mark.parametrize("name", ONE_ENCODER)
def test_what_is_behind_the_limit_means_nothing_and_what_is_before_it_does(name: str) -> None:
    """The tokenizers of these tiny pipelines make one token of a letter."""
    made = flow_families.FAMILIES[name]()
    parts = {name: part for name, part in made.parts.items() if name in made.adapter.contract.preparer}
    tokenizers = {"tokenizer": made.parts["tokenizer"]}

    def meaning(prompt: str) -> Any:
        return made.adapter.encode_conditions(parts, Request(prompt=prompt), negative=False).positive

    around, most = made.adapter.lengths(tokenizers, "")["tokenizer"]
    assert made.adapter.lengths(tokenizers, "abc") == {"tokenizer": (around + 3, most)}
    whole = "a" * (most - around)
    assert made.adapter.lengths(tokenizers, whole) == {"tokenizer": (most, most)}
    assert not tree.equal(meaning(whole[:-1] + "b"), meaning(whole))
    longer = "a" * most
    assert made.adapter.lengths(tokenizers, longer + "b")["tokenizer"] == (around + most + 1, most)
    assert tree.equal(meaning(longer + "b"), meaning(longer + "c"))


def test_an_edition_that_refuses_what_is_too_long_cuts_nothing() -> None:
    made = flow_families.FAMILIES["Qwen-Image-Edit"]()
    assert made.adapter.lengths({"tokenizer": made.parts["tokenizer"]}, "a" * 9999) == {}


class Reader:
    """Reads six tokens by a tokenizer of letters that puts one around a prompt, and knows what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def lengths(self, parts: Any, prompt: str) -> dict[str, tuple[int, int]]:
        self.asked.append(prompt)
        return {"tokenizer": (len(prompt) + 1, 6), "tokenizer_2": (2 * len(prompt), 100)}


def test_every_data_set_has_one_line_with_a_count_and_the_first_place() -> None:
    rows = [
        Row({"prompt": "abcde"}, "p.jsonl", 1, "birds"),
        Row({"prompt": "abcdef"}, "p.jsonl", 2, "birds"),
        Row({"prompt": "ab", "negative_prompt": "abcdefg"}, "q.jsonl", 1, "cats"),
        Row({"prompt": "abcdef", "negative_prompt": "abcdefgh"}, "p.jsonl", 4, "birds"),
    ]
    reader = Reader()
    assert cut_prompts(reader, {}, rows) == [
        "data set birds: 2 rows have a prompt that is cut, the first p.jsonl:2, read to 6 of 7 tokens by tokenizer",
        "data set cats: 1 row has a prompt that is cut, the first q.jsonl:1, read to 6 of 8 tokens by tokenizer",
    ]
    assert reader.asked == ["", "abcde", "abcdef", "abcdefg", "abcdefgh"], "each once, and what is surely short never"
    assert cut_prompts(Reader(), {}, rows[:1]) == []
    letters = Row({"prompt": "ééé"}, "p.jsonl", 1, "birds")
    assert cut_prompts(Reader(), {}, [letters]) == [], "what is not ASCII is counted"


def spec(folder: Path, name: str, out: Path) -> RunSpec:
    rows = [{"prompt": "a"}, {"prompt": "abcdefgh"}, {"prompt": "abcdefghij"}]
    (out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [{"kind": "jsonl", "path": str(out / "prompts.jsonl"), "name": "mine"}]
    reward = {"kind": "function", "function": "areno_fn.world.picture_rewards:brightness"}
    algorithm = {"kind": "flow_grpo", "samples": 2, "denoising": {"steps": 2}}
    table = {
        "out": str(out / "out"),
        "device": "cpu",
        "model": {"kind": "hf", "path": str(folder / name / "pipeline"), "pipeline": {"height": 16, "width": 16}},
        "phases": [{"name": "p", "steps": 1, "algorithm": algorithm, "data": data, "rewards": [reward]}],
        "evaluation": {"data": data, "rewards": [reward]},
    }
    return msgspec.convert(table, RunSpec)


@pytest.mark.parametrize(
    ("name", "read"),
    [("sd3", "8 of 10 tokens by tokenizer and 8 of 10 tokens by tokenizer_2"), ("flux", "8 of 10 tokens by tokenizer")],
)
def test_a_dry_run_tells_of_phases_and_of_the_evaluation(name: str, read: str, folder: Path, tmp_path: Path) -> None:
    """A CLIP encoder here reads 8 tokens, two of them around the letters; its T5 reads hundreds."""
    asked = spec(folder, name, tmp_path)
    made = plan(asked)
    line = f"    data set mine: 2 rows have a prompt that is cut, the first {tmp_path}/prompts.jsonl:2, read to {read}"
    assert describe(asked).splitlines().count(line) == 2
    assert made.medium.cut(made.phases[0].rows) == [line.strip()]
    assert isinstance(made.medium, PromptedPictures)
    assert all(part.startswith("tokenizer") for part in made.medium.parts.materialised), "no weight is read for it"


def test_a_run_tells_it_once_before_its_first_step(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(spec(folder, "flux", tmp_path)) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "have a prompt that is cut" in line]
    assert [line.split(": ")[0] for line in told] == ["phases.p", "evaluation"]
