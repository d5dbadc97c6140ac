"""Weights in bfloat16 and updates too small for them: they are kept in masters, over phases and into exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from e2e import tiny
from safetensors.torch import load_file

import areno_fn as af

LR = 1e-6


def half(tmp_path: Path) -> Path:
    """A model in bfloat16, as a folder."""
    made = tmp_path / "made"
    done = tiny.run(
        tiny.write_spec(tmp_path), made, phases__sft__steps=1, phases__grpo__steps=1, export__dtype="bfloat16"
    )
    assert (done.code, done.err) == (0, "")
    return made / "export"


def trained(tmp_path: Path, source: Path, name: str, phases: list[dict[str, Any]], **values: Any) -> Path:
    out = tmp_path / name
    model = {"kind": "hf", "path": str(source)}
    done = tiny.run(tiny.write_spec(tmp_path), out, model=model, phases=phases, **values)
    assert (done.code, done.err) == (0, "")
    return out


def phase(name: str, steps: int) -> dict[str, Any]:
    return {
        "name": name,
        "steps": steps,
        "algorithm": {"kind": "sft"},
        "data": [{"kind": "arithmetic", "digits": 1, "count": 40}],
        "batch": {"rows": 4, "max_length": 16},
        "optimizers": [{"kind": "adamw", "lr": LR, "weight_decay": 0.0}],
    }


def test_O1_at_a_rate_of_1e_6_the_export_in_float32_has_moved_and_the_one_in_bfloat16_is_its_rounding(
    tmp_path: Path,
) -> None:
    source = half(tmp_path)
    before = load_file(source / "model.safetensors")
    out = trained(tmp_path, source, "wide", [phase("sft", 3)], export__dtype="float32")
    wide = load_file(out / "export/model.safetensors")
    for name, weight in before.items():
        assert wide[name].dtype == torch.float32
        moved = (wide[name] - weight.float()).abs()
        assert moved.max() > 0.5 * LR, f"{name} has not moved"
        assert moved.max() < 4 * LR, "three steps of AdamW move a weight by about three rates at most"
    norm = "model.norm.weight"
    assert torch.equal(wide[norm].bfloat16(), before[norm]), "in bfloat16 a weight of about 1 cannot show it"

    narrow = trained(tmp_path, source, "narrow", [phase("sft", 3)])
    stored = load_file(narrow / "export/model.safetensors")
    assert all(torch.equal(stored[name], weight.bfloat16()) for name, weight in wide.items())
    _, params = af.load_hf(narrow / "export")
    master = {name: leaf for name, leaf in tiny.tensors(narrow).items() if name.startswith("optim.actor.master")}
    assert master and all(leaf.dtype == torch.float32 for leaf in master.values())
    assert all(leaf.dtype == torch.bfloat16 for leaf in af.tree.leaves(params))


def test_O1_what_a_phase_has_added_up_goes_on_in_the_next(tmp_path: Path) -> None:
    source = half(tmp_path)
    before = load_file(source / "model.safetensors")["model.norm.weight"].float()

    def drift(name: str, phases: list[dict[str, Any]]) -> torch.Tensor:
        out = trained(tmp_path, source, name, phases, export__dtype="float32")
        return (load_file(out / "export/model.safetensors")["model.norm.weight"] - before).abs().max()

    once = drift("once", [phase("a", 3)])
    twice = drift("twice", [phase("a", 3), phase("b", 3)])
    assert twice > 1.5 * once
