"""Everything the README and the guides show is run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
import torch

import areno_fn as af
from areno_fn.contracts.spec import PPO, ClipReward, FunctionReward, HttpReward, ModelReward, OptimizerSpec, RewardSpec
from areno_fn.testing import laws

ROOT = Path(__file__).parents[2]
SMALL = [
    "phases.sft.steps=2",
    "phases.sft.stop_at=0",
    "phases.sft.batch.rows=4",
    "phases.grpo.steps=2",
    "phases.grpo.batch.rows=2",
    "evaluation.every=1",
    "evaluation.limit=4",
]


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def run_block(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.chdir(folder)
    for name in ("specs",):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    scope: dict[str, object] = {"__name__": "guide"}
    exec(compile(code, "guide", "exec"), scope)
    return scope


def test_the_custom_pipeline_trains_the_quickstart_model_with_its_own_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = blocks("README.md", "python")
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 12
    shortened = code.replace('["out=out/reinforce"]', repr(["out=out/reinforce", *SMALL]))
    assert shortened != code
    run_block(shortened, tmp_path, monkeypatch)
    summary = json.loads((tmp_path / "out/reinforce/summary.json").read_text())
    assert [phase["name"] for phase in summary["phases"]] == ["sft", "grpo"]
    lines = [json.loads(line) for line in (tmp_path / "out/reinforce/metrics.jsonl").read_text().splitlines()]
    grpo = [line for line in lines if line["phase"] == "grpo" and "train/loss" in line]
    assert len(grpo) == 2
    # the clipped surrogate would report how often it clips; this loss reports nothing but itself
    assert all("train/clip_fraction" not in line for line in grpo)


def test_a_loss_for_a_phase_that_is_not_there_is_refused() -> None:
    spec = af.read_spec(str(ROOT / "specs/quickstart.toml"))
    with pytest.raises(ValueError, match=r"no phase 'dpo'; the phases are sft, grpo"):
        af.plan(spec, losses={"dpo": af.clipped()})


def test_a_loss_that_does_not_fit_its_phase_is_refused_before_anything_runs() -> None:
    spec = af.read_spec(str(ROOT / "specs/quickstart.toml"))
    with pytest.raises(TypeError, match=r"returns Scores, but .* takes Actions"):
        af.plan(spec, losses={"sft": af.clipped()})


def test_the_guide_to_losses_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, tried, of_tokens, compared = blocks("docs/adding/loss.md", "python")
    run_block(refused, tmp_path, monkeypatch)
    scope = run_block(tried, tmp_path, monkeypatch)
    state = scope["state"]
    assert isinstance(state, af.TrainState)
    assert state.counters.optimizer_step == 1
    found = run_block(of_tokens, tmp_path, monkeypatch)["advantages"]
    assert isinstance(found, torch.Tensor) and found.mean().abs() < 1e-6 and found[0, 1] == 0
    shortened = compared.replace('["out=out/ranked"]', repr(["out=out/ranked", *SMALL]))
    assert shortened != compared
    ranked = run_block(shortened, tmp_path, monkeypatch)["ranked"]
    groups = torch.tensor([0, 1, 0, 1, 0])
    assert ranked(torch.tensor([1.0, 5.0, 2.0, 5.0, 4.0]), groups).tolist() == pytest.approx([-2 / 3, 0, 0, 0, 2 / 3])  # type: ignore[operator]
    assert (tmp_path / "out/ranked/summary.json").exists()


def test_the_guide_to_laws_is_a_test_file_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = run_block("\n\n".join(blocks("docs/laws.md", "python")), tmp_path, monkeypatch)
    tests = [value for name, value in scope.items() if name.startswith("test_")]
    assert len(tests) == 10
    for test in tests:
        test()  # type: ignore[operator]
    actions = af.Actions(
        **dict.fromkeys(("logp", "old", "advantage", "entropy"), torch.arange(7.0)),
        weight=torch.ones(7),
        segments=torch.zeros(7, dtype=torch.int64),
        documents=1,
    )
    calls = [
        lambda: laws.mask_blind(scope["careless"], actions),
        lambda: laws.no_alias(scope["roles"], scope["state"], in_place=("actor",)),
    ]
    for call, said in zip(calls, blocks("docs/laws.md", "text"), strict=True):
        with pytest.raises(AssertionError, match=f"^{re.escape(said.strip())}$"):
            call()


def test_the_guide_to_roles_runs_and_its_settings_are_those_of_a_specification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = blocks("docs/roles.md", "python")
    scope = run_block(code, tmp_path, monkeypatch)
    state, metrics = scope["state"], scope["metrics"]
    assert isinstance(state, af.TrainState) and isinstance(metrics, dict)
    assert state.counters.optimizer_step == 3
    assert {"critic/loss", "train/loss", "critic/lr", "train/lr"} <= metrics.keys()
    assert metrics["critic/loss"] > 0 and metrics["critic/grad_norm"] > 0 and metrics["train/grad_norm"] > 0
    (settings,) = blocks("docs/roles.md", "toml")
    table = tomllib.loads(settings)["phases"]
    assert msgspec.convert(table["algorithm"], PPO).critic.updates == 2
    assert [msgspec.convert(entry, OptimizerSpec).role for entry in table["optimizers"]] == ["actor", "critic"]


def test_every_law_is_in_the_guide() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/laws.md").read_text(encoding="utf-8"), flags=re.MULTILINE))
    of_layouts = {"Run", "checkpoint_roundtrip", "iso_roundtrip", "layout_agrees", "placements_agree", "shards_agree"}
    assert rows == set(laws.__all__) - of_layouts


def test_the_guide_to_rewards_runs_and_its_settings_are_those_of_a_specification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    written, tried = blocks("docs/adding/reward.md", "python")
    run_block(written, tmp_path, monkeypatch)
    try:
        run_block(tried, tmp_path, monkeypatch)
    finally:
        sys.modules.pop("my_rewards", None)
    settings = blocks("docs/adding/reward.md", "toml")
    tables = [table for block in settings for table in tomllib.loads(block)["phases"]["rewards"]]
    rewards = [msgspec.convert(table, RewardSpec) for table in tables]
    assert [type(reward) for reward in rewards] == [FunctionReward, FunctionReward, ModelReward, ClipReward, HttpReward]


def test_the_guide_to_layouts_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/adding/model.md").read_text(encoding="utf-8")
    scope: dict[str, object] = {"__name__": "guide"}
    compared = 0
    for language, content in re.findall(r"```(python|text)\n(.*?)```", text, flags=re.DOTALL):
        if language == "python":
            assert capsys.readouterr().out == "", "the guide shows all that is printed"
            exec(compile(content, "guide", "exec"), scope)
        else:
            assert capsys.readouterr().out == content
            compared += 1
    assert compared == 4


def test_the_make_targets_of_the_readme_exist() -> None:
    named = set(re.findall(r"^make ([\w-]+)", "\n".join(blocks("README.md", "bash")), flags=re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert named == {"quickstart", "quickstart-flow", "test"}
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in named)


def test_the_command_of_the_readme_trains_a_folder_with_a_reward_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = _tiny_folder(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    (tmp_path / "my_rewards.py").write_text(
        "def score(rows, completions):\n    return [float(len(text)) for text in completions]\n"
    )
    command = next(block for block in blocks("README.md", "bash") if "areno_fn.run" in block)
    words = command.replace("\\\n", " ").replace("PATH_OF_A_HUGGING_FACE_FOLDER", str(export)).split()
    assert words[:3] == ["python", "-m", "areno_fn.run"]
    small = ["phases.grpo.steps=1", "phases.grpo.batch.rows=2", "phases.grpo.batch.max_length=64"]
    small += ["phases.grpo.algorithm.sampling.max_tokens=4"]
    extra = [word for change in small for word in ("--set", change)]
    (tmp_path / "specs").symlink_to(ROOT / "specs")
    done = subprocess.run(
        [sys.executable, *words[1:], *extra], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/mine/export/model.safetensors").exists()


def _tiny_folder(folder: Path) -> Path:
    changes = ["model.config.hidden_size=32", "model.config.num_hidden_layers=1", "model.config.intermediate_size=32"]
    changes += ["model.config.num_attention_heads=2", "model.config.num_key_value_heads=2"]
    spec = af.read_spec(str(ROOT / "specs/quickstart.toml"), [*SMALL, *changes, f"out={folder / 'tiny'}"])
    assert af.train(spec) == 0
    return folder / "tiny" / "export"


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "specs").glob("*.toml")))
def test_packed_specifications_agree_with_their_source(name: str) -> None:
    source, packed = ROOT / f"specs/{name}.toml", ROOT / f"specs/{name}.msgpack"
    assert af.read_spec(str(source)) == af.read_spec(str(packed)), f"run python -m areno_fn.spec pack {source}"
