"""A run that stops making sense says so and stops."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.tiny import SPEC

import areno_fn as af
from areno_fn.ckpt.resume import latest
from areno_fn.contracts.errors import DivergenceError, JoinError


def spec(folder: Path, *changes: str) -> af.RunSpec:
    source = folder / "tiny.toml"
    source.write_text(SPEC)
    return af.read_spec(str(source), [f"out={folder / 'out'}", "checkpoint.every=1", "log.tensorboard=false", *changes])


def test_a_loss_that_is_not_finite_ends_the_run_before_its_checkpoint(tmp_path: Path) -> None:
    def poisoned(scores: af.Scores) -> af.Sums:
        sums = af.cross_entropy()(scores)
        # the third step of this loss is NaN: the model has by then seen two batches
        calls.append(1)
        total = sums.total * (float("nan") if len(calls) > 2 else 1.0)
        return af.Sums(total=total, weight=sums.weight, stats=sums.stats, peaks=sums.peaks)

    calls: list[int] = []
    with pytest.raises(
        DivergenceError, match=r"phases\.sft: train/loss is nan at step 3, and nothing of that step is kept"
    ):
        af.train(spec(tmp_path), losses={"sft": poisoned})
    kept = latest(tmp_path / "out/checkpoints")
    assert kept is not None
    assert kept.name == "step-00000002"
    assert not (tmp_path / "out/export").exists()


def test_a_loss_that_returns_no_sums_is_told_what_to_return(tmp_path: Path) -> None:
    def bare(scores: af.Scores) -> af.Sums:
        return -scores.logp.mean()  # type: ignore[return-value]

    with pytest.raises(JoinError, match=r"is declared to return Sums, but returned Tensor; end the loss with total"):
        af.train(spec(tmp_path), losses={"sft": bare})


def test_resuming_where_nothing_is_says_that_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert af.train(spec(tmp_path, "phases.sft.steps=1", "phases.grpo.steps=1"), resume=True) == 0
    assert "this run starts at its beginning" in capsys.readouterr().out
