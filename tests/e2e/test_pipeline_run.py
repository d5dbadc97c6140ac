"""Runs of tiny pipelines of diffusers: trained in full and by adapters, written, and read again by diffusers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flow_pipelines
import numpy as np
import pytest
import torch
from PIL import Image

from areno_fn.contracts.spec import RunSpec
from areno_fn.engine.session import run
from areno_fn.engine.specfile import read

SIDE = 16
MAKERS: dict[str, Callable[[Path], Any]] = {
    "sd3": flow_pipelines.sd3,
    "flux": flow_pipelines.flux,
    "kontext": lambda folder: flow_pipelines.flux(folder, "FluxKontextPipeline"),
}
SPEC = """name = "tiny"
out = "{out}"
device = "cpu"
model = {{ kind = "hf", path = "{pipeline}", pipeline = {{ height = 16, width = 16 }} }}
finetune = {finetune}

[[phases]]
name = "sft"
steps = 1
algorithm = {{ kind = "flow_sft" }}
data = [{{ kind = "jsonl", path = "{rows}/shown.jsonl" }}]
batch = {{ rows = 2 }}
optimizers = [{{ kind = "adamw", lr = 0.003 }}]

[[phases]]
name = "dpo"
steps = 1
algorithm = {{ kind = "flow_dpo", beta = 10.0 }}
data = [{{ kind = "jsonl", path = "{rows}/pairs.jsonl" }}]
batch = {{ rows = 2 }}
optimizers = [{{ kind = "adamw", lr = 0.003 }}]

[[phases]]
name = "grpo"
steps = 1
algorithm = {{ kind = "flow_grpo", samples = 2, kl_coef = 0.1, denoising = {{ steps = 2, guidance = {guidance} }} }}
data = [{{ kind = "jsonl", path = "{rows}/prompts.jsonl" }}]
batch = {{ rows = 2 }}
optimizers = [{{ kind = "adamw", lr = 0.003 }}]
rewards = [{{ kind = "function", function = "areno_fn.world.picture_rewards:brightness" }}]

[evaluation]
data = [{{ kind = "jsonl", path = "{rows}/prompts.jsonl" }}]
rewards = [{{ kind = "function", function = "areno_fn.world.picture_rewards:contrast" }}]
denoising = {{ steps = 2, guidance = {guidance} }}

[log]
tensorboard = false
"""
FULL, LORA = '{ kind = "full" }', '{ kind = "lora", rank = 2 }'


def write_rows(folder: Path, given: bool) -> None:
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE, 3)).astype(np.uint8)
    for place, one in enumerate(pixels):
        Image.fromarray(one).save(folder / f"{place}.png")
    inputs = {"inputs": ["2.png"]} if given else {}
    shown = [
        {"prompt": "a cat", "image": "0.png"} | inputs,
        {"prompt": "a dog", "negative_prompt": "bad", "image": (pixels[1] / 255).transpose(2, 0, 1).tolist()} | inputs,
    ]
    prompts = [{"prompt": "a cat"} | inputs, {"prompt": "a dog", "negative_prompt": "bad"} | inputs]
    pairs = [{"prompt": "a cat", "chosen": f"{one}.png", "rejected": f"{1 - one}.png"} | inputs for one in (0, 1)]
    for name, rows in (("shown", shown), ("prompts", prompts), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def spec_of(folder: Path, finetune: str, name: str = "sd3", guidance: float = 2.0) -> RunSpec:
    text = SPEC.format(
        out=folder / "out", pipeline=folder / "pipeline", finetune=finetune, rows=folder / "rows", guidance=guidance
    )
    (folder / "spec.toml").write_text(text)
    return read(folder / "spec.toml")


@pytest.mark.parametrize("finetune", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", list(MAKERS))
def test_a_pipeline_is_trained_written_and_read_again_by_diffusers(name: str, finetune: str, tmp_path: Path) -> None:
    theirs = MAKERS[name](tmp_path)
    write_rows(tmp_path / "rows", given=name == "kontext")
    spec = spec_of(tmp_path, finetune)
    assert run(spec) == 0
    out = tmp_path / "out"
    again = type(theirs.transformer).from_pretrained(out / "export").eval()
    before, after = theirs.transformer.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved and "pos_embed.pos_embed" not in moved
