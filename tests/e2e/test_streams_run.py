"""A run of video with sound, guided as its pipeline guides: what it draws is scored alike, written, and drawn by diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flow_families
import pytest
import torch
from e2e.tiny_films import FULL, LORA, phase, spec_of, stored

from areno_fn.ckpt.resume import latest
from areno_fn.contracts.errors import ArenoError
from areno_fn.contracts.flow_adapter import StreamGuidance
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Denoising
from areno_fn.engine.plan import plan
from areno_fn.engine.session import run
from areno_fn.engine.start import resumed_state
from areno_fn.steps.flow.noise import latent_noise

GUIDED = {"steps": 3, "guidance": 2.0}


@pytest.mark.parametrize("finetune", [FULL, LORA], ids=["full", "lora"])
def test_guidance_of_streams_is_that_of_diffusers_after_a_run(finetune: Any, tmp_path: Path) -> None:
    said = StreamGuidance(audio=4.0, blocks=(1,))
    tiny = stored(flow_families.ltx2("2.3", said), tmp_path)
    phases = [phase(tmp_path, "flow_grpo", samples=2, denoising=GUIDED) | {"remat": int(finetune is LORA)}]
    spec = spec_of(tiny, tmp_path, phases, finetune=finetune, pipeline={"streams": {"audio": 4.0, "blocks": [1]}})
    assert run(spec) == 0
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    ratios = [line["train/ratio_max"] for line in lines if "train/ratio_max" in line]
    assert ratios == [pytest.approx(1.0, abs=1e-6)]  # rows of an update stand in another order than they were drawn in
    made, cpu = plan(spec), torch.device("cpu")
    prompts = made.phases[0].prompts
    assert prompts is not None
    view = made.finetune.view(resumed_state(made, latest(tmp_path / "out/checkpoints")).params)
    drawn_by = Denoising(steps=3, guidance=3.0)
    ours = made.medium.draw(view, prompts, Key.of(7), drawn_by, device=cpu, max_rows=2)
    again = type(tiny.theirs).from_pretrained(tmp_path / "out/export")
    again.set_progress_bar_config(disable=True)
    size, start = tiny.adapter.size, latent_noise(Key.of(7).fold("start"), torch.tensor([0, 1]), ours.shape[1:])
    call = {"height": size.height, "width": size.width, "num_frames": size.frames, "num_inference_steps": 3}
    call |= {"prompt": ["a heron", "a crane"], "negative_prompt": ["bad", ""], "output_type": "latent"}

    def theirs(pipe: Any) -> torch.Tensor:
        return tiny.taken(pipe(**call, **tiny.call, **tiny.given(start), return_dict=False))

    assert float((ours - theirs(again)).abs().max()) <= 1e-4 < float((ours - theirs(tiny.theirs)).abs().max())


@pytest.mark.parametrize(
    ("sound", "words"),
    [
        (
            [[0.1] * 9000],
            r"the sound is \[1, 9000\], 0.375 s at 24000 samples a second, but the model makes 2 channels",
        ),
        (
            [[0.1] * 1000] * 2,
            r"the sound is \[2, 1000\], 0.042 s at 24000 .* makes 2 channels of 0.375 s; cut or lengthen it",
        ),
        ([[0.1] * 96000] * 2, r"the sound is \[2, 96000\], 4.000 s at 24000 .* makes 2 channels of 0.375 s"),
    ],
)
def test_sound_is_as_long_as_its_video(sound: Any, words: str, tmp_path: Path) -> None:
    tiny = stored(flow_families.ltx2("2"), tmp_path)
    rows = tmp_path / "rows/shown.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    rows.write_text("".join(json.dumps(line | {"audio": sound}) + "\n" for line in lines))
    with pytest.raises(ArenoError, match=f"shown.jsonl:1: {words}"):
        plan(spec_of(tiny, tmp_path, [phase(tmp_path, "flow_sft")]))
    rows.write_text("".join(json.dumps(line | {"audio": [[0.1] * 9000] * 2}) + "\n" for line in lines))
    plan(spec_of(tiny, tmp_path, [phase(tmp_path, "flow_sft")]))


def test_streams_are_for_video_with_sound_that_has_guidance(tmp_path: Path) -> None:
    silent, heard = tmp_path / "silent", tmp_path / "heard"
    for folder in (silent, heard):
        folder.mkdir()
    wan = stored(flow_families.wan(), silent)
    asked = [phase(silent, "flow_grpo", denoising=GUIDED)]
    with pytest.raises(
        ArenoError, match="pipeline: streams: wan makes one medium, and no video with sound; remove this"
    ):
        plan(spec_of(wan, silent, asked, pipeline={"streams": {}}))
    ltx2 = stored(flow_families.ltx2("2"), heard)
    asked = [phase(heard, "flow_grpo", denoising={"steps": 3})]
    with pytest.raises(ArenoError, match="^model.pipeline.streams: nothing in this run has guidance; give a denoising"):
        plan(spec_of(ltx2, heard, asked, pipeline={"streams": {"audio": 4.0}}))
    plan(spec_of(ltx2, heard, asked))
    asked = [phase(heard, "flow_grpo", denoising=GUIDED)]
    with pytest.raises(
        ArenoError, match="streams.blocks: with perturbed = 0 no attention is perturbed; raise that, or remove"
    ):
        plan(spec_of(ltx2, heard, asked, pipeline={"streams": {"perturbed": 0.0, "blocks": [1]}}))
