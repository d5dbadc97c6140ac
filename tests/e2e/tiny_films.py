"""Specifications of tiny pipelines that make videos, and the rows that they read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from flow_families import Tiny
from PIL import Image

from areno_fn.contracts.spec import RunSpec

FULL: Mapping[str, Any] = {"kind": "full"}
LORA: Mapping[str, Any] = {"kind": "lora", "rank": 2, "alpha": 3.0}
MOVED = {"kind": "adamw", "lr": 0.003}
BRIGHT = [{"kind": "function", "function": "areno_fn.world.picture_rewards:brightness"}]


def stored(tiny: Tiny, folder: Path, *, given: bool = False) -> Tiny:
    """The same pipeline, in `pipeline` of a folder, with `shown`, `pairs` and `prompts` beside it.

    Args:
        given: every row is given a video too.
    """
    tiny.theirs.save_pretrained(folder / "pipeline")
    size = tiny.adapter.size
    (folder / "rows").mkdir()
    for shade in range(size.frames + 2):
        Image.new("RGB", (size.width, size.height), (20 * shade,) * 3).save(folder / f"rows/{shade}.png")
    one, other, third = ([f"{place + first}.png" for place in range(size.frames)] for first in (0, 1, 2))
    inputs = {"inputs": [{"video": third}]} if given else {}
    rows = {
        "shown": [{"prompt": "a heron", "video": one} | inputs, {"prompt": "a crane", "video": other} | inputs],
        "pairs": [{"prompt": "a heron", "chosen": one, "rejected": other} | inputs] * 2,
        "prompts": [{"prompt": "a heron", "negative_prompt": "bad"} | inputs, {"prompt": "a crane"} | inputs],
    }
    for name, lines in rows.items():
        (folder / f"rows/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return tiny


def phase(folder: Path, kind: str, steps: int = 1, **algorithm: Any) -> dict[str, Any]:
    """A phase of a kind, on the rows that it reads."""
    data = {"flow_sft": "shown", "flow_dpo": "pairs"}.get(kind, "prompts")
    own = {} if data != "prompts" else {"rewards": BRIGHT}
    return {
        "name": kind, "steps": steps, "algorithm": {"kind": kind, **algorithm}, "optimizers": [MOVED], "batch": {"rows": 2},
        "data": [{"kind": "jsonl", "path": str(folder / f"rows/{data}.jsonl")}], **own,
    }  # fmt: skip


def three(folder: Path, **denoising: Any) -> list[dict[str, Any]]:
    """Phases of flow_sft, flow_dpo and flow_grpo."""
    grpo = {"samples": 2, "kl_coef": 0.1, "denoising": {"steps": 3, "guidance": 2.0, **denoising}}
    return [phase(folder, "flow_sft"), phase(folder, "flow_dpo", beta=10.0), phase(folder, "flow_grpo", **grpo)]


def spec_of(tiny: Tiny, folder: Path, phases: list[dict[str, Any]], **changes: Any) -> RunSpec:
    """A run of them; `pipeline` are settings of the pipeline, the rest is as in a specification."""
    size = tiny.adapter.size
    sizes = {"height": size.height, "width": size.width, "frames": size.frames}
    model = {"kind": "hf", "path": str(folder / "pipeline"), "pipeline": sizes | changes.pop("pipeline", {})}
    run = {"out": str(folder / "out"), "device": "cpu", "model": model, "phases": phases, "log": {"tensorboard": False}}
    return msgspec.convert(run | changes, RunSpec)
