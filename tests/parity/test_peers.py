"""A few of the models of `peers.py`: every variant once, forms and dtypes in turn. The script runs them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from parity import peers

from areno_fn.ckpt import hf
from areno_fn.models.layouts import FAMILY_LAYOUTS

ALL = list(peers.cases())
FORMS = [("float32", False, False), ("bfloat16", True, False), ("bfloat16", False, True), ("float32", True, False)]


def few() -> list[peers.Case]:
    """One form of every variant."""
    chosen = []
    for number, (family, variant) in enumerate(peers.peers()):
        mine = [case for case in ALL if (case.family, case.variant) == (family.name, variant)]
        wanted = FORMS[number % len(FORMS)]
        chosen.append(next((c for c in mine if (c.dtype, c.sharded, c.alone) == wanted), mine[0]))
    return chosen


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("case", few(), ids=str)
def test_a_model_comes_back_bit_for_bit(case: peers.Case, tmp_path: Path) -> None:
    result = peers.check(case, tmp_path)
    assert result.problems == ()
    assert result.leaves < result.tensors


def test_every_family_that_transformers_has_is_tried() -> None:
    missing = {family.name for family in FAMILY_LAYOUTS} - {case.family for case in ALL}
    assert missing <= {"bailing", "minicpmv46"}, "older versions of transformers lack these"
    assert {(case.dtype, case.sharded, case.alone) for case in few()} == set(FORMS)


@pytest.mark.parametrize("fault", ["swapped", "rounded", "other dtype", "lost"])
def test_a_planted_fault_is_noticed(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = hf.load

    def wrong(*arguments: Any, **options: Any) -> Any:
        leaves = right(*arguments, **options)
        name = "layers.0.qkv"
        if fault == "swapped":
            leaves[name] = leaves[name].flip(0)
        elif fault == "rounded":
            leaves[name] = leaves[name].half().float()
        elif fault == "other dtype":
            leaves[name] = leaves[name].double()
        else:
            leaves["embed"] = torch.zeros_like(leaves["embed"])
        return leaves

    monkeypatch.setattr(hf, "load", wrong)
    (case,) = (c for c in ALL if str(c) == "llama, untied, float32, single")
    result = peers.check(attrs.evolve(case, alone=True), tmp_path)
    assert any("has another" in problem for problem in result.problems), result.problems
