"""A critic comes with the first phase that trains it, and goes with it as long as that has not begun."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import tiny

PPO = """
[[phases]]
name = "ppo"
steps = 3
algorithm = { kind = "ppo", kl_coef = 0.1, critic = { warmup = 1 }, sampling = { max_tokens = 4 } }
data = [{ kind = "arithmetic", digits = 1, count = 20 }]
batch = { rows = 4, max_length = 16 }
optimizers = [{ kind = "adamw", lr = 0.003 }, { kind = "adamw", role = "critic", lr = 0.003 }]
rewards = [{ kind = "function", function = "areno_fn.world.rewards:length_penalty" }]
"""
_FIRST, _REST = tiny.SPEC.split('\n[[phases]]\nname = "grpo"')
SFT = (_FIRST + "\n[checkpoint]" + _REST.split("\n[checkpoint]")[1]).replace("\nevery = 2", "\nevery = 1\nkeep = 9")
BOTH = SFT.replace("\n[checkpoint]", PPO + "\n[checkpoint]")
ACCEPT = ("phases", "data", "optimizers")


def run(home: Path, text: str, out: Path, *accept: str, **values: Any) -> tiny.Done:
    home.mkdir(parents=True, exist_ok=True)
    spec = tiny.write_spec(home, text, "run.toml")
    return tiny.run(spec, out, *[word for field in accept for word in ("--accept", field)], **values)


def resumed(home: Path, text: str, out: Path, *accept: str, **values: Any) -> tiny.Done:
    spec = tiny.write_spec(home, text, "run.toml")
    flags = [word for field in accept for word in ("--accept", field)]
    return tiny.run(spec, out, "--resume", *flags, **values)


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Complete runs of 4 steps, and of 4 + 3 steps, with a checkpoint after every step."""
    found = {}
    for name, text in (("sft", SFT), ("both", BOTH)):
        home = tmp_path_factory.mktemp(name)
        done = run(home, text, home / "out")
        assert (done.code, done.err) == (0, "")
        found[name] = home / "out"
    return found


def copied(whole: Path, tmp_path: Path, steps: int) -> Path:
    """The run as it was after so many steps."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    for folder in (out / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > steps:
            shutil.rmtree(folder)
    return out


@pytest.mark.parametrize("steps", [2, 4])
def test_a_phase_with_a_critic_is_added(steps: int, wholes: dict[str, Path], tmp_path: Path) -> None:
    """In the middle of the phase before it or behind that: the state is the one of a run that had it from the first."""
    out = copied(wholes["sft"], tmp_path, steps)
    plain = resumed(tmp_path, BOTH, out)
    assert plain.code == 2 and "or pass --accept phases --accept data --accept optimizers" in plain.err
    done = resumed(tmp_path, BOTH, out, *ACCEPT)
    assert (done.code, done.err) == (0, "")
    assert tiny.state(out) == tiny.state(wholes["both"])


def test_a_critic_of_adapters_is_added_and_removed(tmp_path: Path) -> None:
    wholes = {name: tmp_path / name for name in ("sft", "both")}
    for name, text in (("sft", SFT), ("both", BOTH)):
        assert run(tmp_path, text, wholes[name], finetune="lora").code == 0
    for before, after, text in (("sft", "both", BOTH), ("both", "sft", SFT)):
        (tmp_path / after / "again").mkdir()
        out = copied(wholes[before], tmp_path / after / "again", 3)
        done = resumed(tmp_path, text, out, *ACCEPT, finetune="lora")
        assert (done.code, done.err) == (0, "")
        assert tiny.state(out) == tiny.state(wholes[after])


@pytest.mark.parametrize("steps", [2, 4])
def test_a_phase_with_a_critic_is_removed_before_it_begins(steps: int, wholes: dict[str, Path], tmp_path: Path) -> None:
    out = copied(wholes["both"], tmp_path, steps)
    assert any(name.startswith("params.critic.") for name in tiny.tensors(out))
    done = resumed(tmp_path, SFT, out, *ACCEPT)
    assert (done.code, done.err) == (0, "")
    tensors, scalars = tiny.state(out)
    wanted, others = tiny.state(wholes["sft"])
    assert tensors == wanted and not any(name.startswith("params.critic") for name in tensors)
    assert scalars == others


def test_what_was_the_last_phase_but_one_can_be_prolonged(wholes: dict[str, Path], tmp_path: Path) -> None:
    """It is done, and its place in the data is known, though the state stands at the beginning of a phase that is gone."""
    out = copied(wholes["both"], tmp_path, 4)
    longer = SFT.replace("steps = 4", "steps = 6")
    done = resumed(tmp_path, longer, out, *ACCEPT)
    assert (done.code, done.err) == (0, "")
    assert run(tmp_path, longer, tmp_path / "whole").code == 0
    assert tiny.state(out) == tiny.state(tmp_path / "whole")


def test_a_phase_that_has_begun_keeps_its_roles(wholes: dict[str, Path], tmp_path: Path) -> None:
    out = copied(wholes["both"], tmp_path, 5)
    before = tiny.files(out)
    grpo = BOTH.replace('"ppo", kl_coef = 0.1, critic = { warmup = 1 }', '"grpo", samples = 4, kl_coef = 0.1').replace(
        ', { kind = "adamw", role = "critic", lr = 0.003 }', ""
    )
    done = resumed(tmp_path, grpo, out, *ACCEPT)
    assert done.code == 2 and len(done.err.splitlines()) == 1
    assert "the phase ppo has begun to train actor and critic, and would now train actor; " in done.err
    done = resumed(tmp_path, SFT, out, *ACCEPT)
    assert done.code == 2 and "the run has begun the phases sft, ppo, and they would now be sft; " in done.err
    assert tiny.files(out) == before


def test_a_changed_coefficient_and_warm_up_hold_from_there_on(wholes: dict[str, Path], tmp_path: Path) -> None:
    """They are numbers in the state, which a rule moves; what was asked for anew is not lost among them."""
    out = copied(wholes["both"], tmp_path, 5)
    values = {"phases__ppo__algorithm__kl_coef": 0.25, "phases__ppo__algorithm__critic__warmup": 2}
    done = resumed(tmp_path, BOTH, out, "phases", **values)
    assert (done.code, done.err) == (0, "")
    steps = [line for line in tiny.lines(out / "metrics.jsonl") if line["phase"] == "ppo" and "time/step" in line]
    assert [line["rollout/kl_coef"] for line in steps] == [0.1, 0.25, 0.25]
    assert ["train/loss" in line for line in steps] == [False, False, True]
    again = resumed(tmp_path, BOTH, out, **values)
    assert (again.code, again.err) == (0, "")


def test_a_critic_counts_by_what_it_is_and_not_by_where_its_folder_lies(
    wholes: dict[str, Path], tmp_path: Path
) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    assert run(tmp_path, BOTH, made, export__roles=["critic"]).code == 0
    named = {"phases__ppo__algorithm__critic__path": f"{made}/critic"}
    assert run(tmp_path, BOTH, out, **named).code == 0
    whole = tiny.state(out)
    for step in (6, 7):
        shutil.rmtree(out / "checkpoints" / f"step-0000000{step}")
    (made / "critic").rename(tmp_path / "elsewhere")
    done = resumed(tmp_path, BOTH, out, phases__ppo__algorithm__critic__path=f"{tmp_path}/elsewhere/")
    assert (done.code, done.err) == (0, "") and tiny.state(out) == whole
    none = resumed(tmp_path, BOTH, out)
    assert none.code == 2 and none.err.count(" and is now ") == 1
    assert 'phases.ppo.algorithm.critic.path was "/' in none.err and ' and is now ""; ' in none.err


def test_a_trained_critic_keeps_its_shapes(wholes: dict[str, Path], tmp_path: Path) -> None:
    made = tmp_path / "made"
    wider = BOTH.replace("intermediate_size = 64", "intermediate_size = 48")
    assert run(tmp_path, wider, made, export__roles=["critic"]).code == 0
    named = {"phases__ppo__algorithm__critic__path": f"{made}/critic"}
    out = copied(wholes["both"], tmp_path, 5)
    done = resumed(tmp_path, BOTH, out, "phases", **named)
    assert done.code == 2 and len(done.err.splitlines()) == 1
    assert (
        "the critic has been trained, and now its parameters would be others ('trunk.layers.0.gate_up' is" in done.err
    )
    shutil.rmtree(out)
    out = copied(wholes["both"], tmp_path, 3)
    done = resumed(tmp_path, BOTH, out, "phases", **named)
    assert (done.code, done.err) == (0, ""), "what no phase has trained begins as the folder"
    assert tiny.tensors(out)["params.critic.trunk.layers.0.down"].shape == torch.Size([32, 48])


def test_two_spellings_of_one_folder_are_one_critic_and_the_order_of_optimizers_does_not_matter(
    wholes: dict[str, Path], tmp_path: Path
) -> None:
    made = tmp_path / "made"
    assert run(tmp_path, BOTH, made, export__roles=["critic"]).code == 0
    second = PPO.replace('name = "ppo"', 'name = "again"')
    text = BOTH.replace("\n[checkpoint]", second + "\n[checkpoint]")
    values = {
        "phases__ppo__algorithm__critic__path": f"{made}/critic",
        "phases__again__algorithm__critic__path": f"{made}/./critic/",
    }
    done = run(tmp_path, text, tmp_path / "out", **values)
    assert (done.code, done.err) == (0, "")
    actor, critic = '{ kind = "adamw", lr = 0.003 }', '{ kind = "adamw", role = "critic", lr = 0.003 }'
    swapped = text.replace(f"{actor}, {critic}", f"{critic}, {actor}")
    assert swapped != text
    done = resumed(tmp_path, swapped, tmp_path / "out", **values)
    assert (done.code, done.err) == (0, "")
