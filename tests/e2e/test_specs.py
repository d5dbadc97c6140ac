"""Specifications of algorithms that sample, as they stand: the reward of the samples rises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e import tiny


def steps_of(name: str, folder: Path) -> list[dict[str, Any]]:
    """The lines of the phase that is called as the specification is."""
    done = tiny.run(tiny.ROOT / f"specs/{name}.toml", folder / "out")
    assert (done.code, done.err) == (0, "")
    return [line for line in tiny.lines(folder / "out/metrics.jsonl") if line["phase"] == name]


@pytest.mark.parametrize("name", ["gspo", "rloo"])
def test_the_reward_of_the_samples_rises(name: str, tmp_path: Path) -> None:
    steps = steps_of(name, tmp_path)
    rewards = [line["rollout/reward_mean"] for line in steps]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1.0
    if name == "gspo":
        assert all(0 < line["train/clip_fraction"] < 1 for line in steps), "the narrow bounds clip, and not everything"
