"""The specification of GSPO as it stands."""

from __future__ import annotations

from pathlib import Path

from e2e import tiny


def test_the_reward_of_the_samples_rises(tmp_path: Path) -> None:
    done = tiny.run(tiny.ROOT / "specs/gspo.toml", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    steps = [line for line in tiny.lines(tmp_path / "out/metrics.jsonl") if line["phase"] == "gspo"]
    rewards = [line["rollout/reward_mean"] for line in steps]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1.0
    assert all(0 < line["train/clip_fraction"] < 1 for line in steps), "the narrow bounds clip, and not everything"
