"""Runs of several roles of flow models: DMD2, TDM, TDM-R1 and on-policy distillation, through checkpoints, export and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel
from e2e import tiny
from e2e.test_kill import Killed, die_after
from e2e.tiny_roles import SPEC

from areno_fn.ckpt.header import read_header
from areno_fn.ckpt.manifest import read_manifest
from areno_fn.ckpt.tensorfile import Reader
from areno_fn.contracts.metrics import meaning
from areno_fn.contracts.roles import Role

PHASES = ("dmd2", "tdm", "r1", "opd")
ACCEPTED = [word for field in ("phases", "data", "optimizers") for word in ("--accept", field)]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return tiny.write_spec(tmp_path, SPEC)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that was left alone."""
    home = tmp_path_factory.mktemp("whole")
    done = tiny.run(tiny.write_spec(home, SPEC), home / "out", checkpoint__every=1, checkpoint__keep=20)
    assert (done.code, done.err) == (0, "")
    return home / "out"


def of_phase(out: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in tiny.lines(out / "metrics.jsonl") if line["phase"] == name]


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by path."""
    headers = [read_header(path) for path in sorted(folder.glob("*.safetensors"))]
    with Reader() as reader:
        return {name: reader.read(header, name) for header in headers for name in header.entries}


def test_every_phase_reports_its_roles(whole: Path) -> None:
    for name in PHASES:
        steps = [line for line in of_phase(whole, name) if "time/step" in line]
        assert len(steps) == 2 and all(line["train/loss"] >= 0 for line in steps)
        for role, phases in {"fake": PHASES[:3], "surrogate": ("r1",)}.items():
            assert all((f"{role}/grad_norm" in line) == (name in phases) for line in steps), (name, role)
        assert all(("reward/brightness" in line) == ("rollout/reward_mean" in line) == (name == "r1") for line in steps)
        known = {key for line in steps for key in line} - {"step", "phase", "time"}
        assert all(meaning(key) for key in known), known
    summary = json.loads((whole / "summary.json").read_text())
    kinds = ["flow_sft", "flow_dmd2", "flow_tdm", "flow_tdm_r1", "flow_distill"]
    assert [phase["algorithm"] for phase in summary["phases"]] == kinds
    assert all(phase["eval_end"] is not None for phase in summary["phases"])


def test_a_phase_is_evaluated_as_it_says(whole: Path) -> None:
    """Before the first step of `dmd2` the model of the phase before is drawn again, with 2 steps in place of 3."""
    before, after = of_phase(whole, "sft")[-1], of_phase(whole, "dmd2")[0]
    assert before["step"] == after["step"] and before["eval/contrast"] != after["eval/contrast"]
    back = of_phase(whole, "dmd2")[-1], of_phase(whole, "tdm")[0]
    assert back[0]["eval/contrast"] != back[1]["eval/contrast"]


def test_a_state_holds_all_roles_and_moves_those_of_its_phase(whole: Path) -> None:
    states = {int(path.name.split("-")[-1]): path for path in (whole / "checkpoints").iterdir()}
    manifest = read_manifest(states[max(states)])
    assert manifest.roles == (
        Role(name="actor"),
        Role(name="fake", exported=False),
        Role(name="surrogate", exported=False),
    )
    assert manifest.values.scalars.get("controls.slow_updates") is None, "it ends with its phase"
    assert read_manifest(states[10]).values.scalars["controls.slow_updates"] == 2
    # steps 5 and 6 are those of dmd2, 11 and 12 those of opd: the surrogate waits, and later both
    tensors = {number: saved(path) for number, path in states.items()}

    def same(role: str, first: int, second: int) -> bool:
        names = [name for name in tensors[first] if name.startswith(f"params.{role}.")]
        return bool(names) and all(torch.equal(tensors[first][name], tensors[second][name]) for name in names)

    assert not same("actor", 5, 6) and not same("fake", 5, 6) and same("surrogate", 5, 6)
    assert not same("surrogate", 9, 10) and not same("fake", 9, 10)
    assert not same("actor", 11, 12) and same("fake", 11, 12) and same("surrogate", 11, 12)


def test_the_export_is_the_generator_alone(whole: Path) -> None:
    assert DiTTransformer2DModel.from_pretrained(whole / "export").config.num_layers == 2
    assert not (whole / "fake").exists() and not (whole / "surrogate").exists()


def test_K20_a_killed_run_of_several_roles_continues_bit_for_bit(
    whole: Path, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed within dmd2, within tdm_r1 between two updates of its slow average, and within opd."""
    out = tmp_path / "out"
    for saves in (5, 4, 2):
        die_after(monkeypatch, "save", saves)
        with pytest.raises(Killed):
            tiny.run(spec, out, "--resume", checkpoint__every=1, checkpoint__keep=20)
        monkeypatch.undo()
    assert tiny.run(spec, out, "--resume", checkpoint__every=1, checkpoint__keep=20).code == 0
    assert tiny.difference(whole, out) is None
    assert tiny.files(whole / "pictures") == tiny.files(out / "pictures")


def test_a_teacher_of_a_folder_stays_what_it_was_and_a_fake_can_be_asked_for(
    whole: Path, spec: Path, tmp_path: Path
) -> None:
    """A student of one layer, from scratch, learns from the exported model of two, on policy and by DMD2."""
    text = SPEC[: SPEC.index("[[phases]]")] + SPEC[SPEC.index('[[phases]]\nname = "opd"') :]
    first = SPEC[SPEC.index('[[phases]]\nname = "dmd2"') : SPEC.index('[[phases]]\nname = "tdm"')]
    tiny.write_spec(tmp_path, text.replace("[evaluation]", first + "[evaluation]"))
    teacher = shutil.copytree(whole / "export", tmp_path / "teacher")
    named: dict[str, Any] = {
        "model__config__num_layers": 1,
        "phases__opd__algorithm__teacher": str(teacher),
        "phases__dmd2__algorithm__teacher": str(tmp_path / "out/../teacher"),
        "export__roles": ["fake"],
    }
    done = tiny.run(spec, tmp_path / "out", **named, phases__dmd2__steps=1)
    assert (done.code, done.err) == (0, "")
    folder = DiTTransformer2DModel.from_pretrained(teacher)
    state = tiny.tensors(tmp_path / "out")
    assert torch.equal(state["params.teacher.out_bias"], folder.proj_out_2.bias)
    assert torch.equal(state["params.teacher.last"], folder.proj_out_1.weight)
    assert not any(name.startswith("optim.teacher") for name in state)
    assert read_manifest(tiny.last_checkpoint(tmp_path / "out")).roles == (
        Role(name="actor"),
        Role(name="fake", exported=False),
        Role(name="teacher", trainable=False, exported=False),
    )
    fake = DiTTransformer2DModel.from_pretrained(tmp_path / "out/fake")
    assert torch.equal(fake.proj_out_2.bias, state["params.fake.out_bias"])
    longer = tiny.run(spec, tmp_path / "out", "--resume", **named)
    assert (longer.code, longer.err) == (0, "") and "algorithm.teacher was" not in longer.out
    elsewhere = str(shutil.copytree(teacher, tmp_path / "elsewhere"))
    moved = named | {f"phases__{name}__algorithm__teacher": elsewhere for name in ("opd", "dmd2")}
    for flags in (("--resume", "--dry-run"), ("--resume",)):
        told = tiny.run(spec, tmp_path / "out", *flags, **moved)
        assert (told.code, told.err) == (0, "")
        (line,) = (line for line in told.out.splitlines() if "phases.opd.algorithm.teacher was" in line)
        assert line.endswith("; the parameters that the run began with go on, which are in its states")
    other = tiny.run(spec, tmp_path / "out", "--resume", **{**named, "phases__opd__algorithm__teacher": ""})
    assert other.code == 2 and "phases.opd.algorithm.teacher" in other.err


def test_adapters_of_all_roles_stand_on_one_frozen_base(whole: Path, spec: Path, tmp_path: Path) -> None:
    model = {"kind": "hf", "path": str(whole / "export")}
    text = SPEC[: SPEC.index("[model]")] + SPEC[SPEC.index('[[phases]]\nname = "r1"') :]
    tiny.write_spec(tmp_path, text)
    done = tiny.run(spec, tmp_path / "out", model=model, finetune={"kind": "lora", "rank": 2}, checkpoint__every=1)
    assert (done.code, done.err) == (0, "")
    manifest = read_manifest(tiny.last_checkpoint(tmp_path / "out"))
    assert manifest.roles is not None
    trunks = {role.name: role.trunk for role in manifest.roles}
    assert trunks == {"actor": "base", "base": "", "fake": "base", "surrogate": "base"}
    steps = [line for line in of_phase(tmp_path / "out", "r1") if "time/step" in line]
    assert steps[0]["flow/gap"] > 0 and steps[-1]["fake/grad_norm"] > 0
    assert (tmp_path / "out/adapter/adapter_config.json").exists()


def test_a_phase_of_other_roles_can_be_added_to_a_run(whole: Path, spec: Path, tmp_path: Path) -> None:
    """What ended after its supervised phase goes on with a generator and its fake, as if both had been asked for at once."""
    before = SPEC[: SPEC.index('[[phases]]\nname = "dmd2"')] + SPEC[SPEC.index("[evaluation]") :]
    after = SPEC[: SPEC.index('[[phases]]\nname = "tdm"')] + SPEC[SPEC.index("[evaluation]") :]
    first, second = tiny.write_spec(tmp_path, before, "a.toml"), tiny.write_spec(tmp_path, after, "b.toml")
    assert tiny.run(first, tmp_path / "out").code == 0
    done = tiny.run(second, tmp_path / "out", "--resume", *ACCEPTED)
    assert (done.err, done.code) == ("", 0)
    assert tiny.run(second, tmp_path / "at once").code == 0
    found, expected = tiny.tensors(tmp_path / "out"), tiny.tensors(tmp_path / "at once")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    back = tiny.run(first, tmp_path / "out", "--resume", *ACCEPTED)
    assert back.code == 2 and "the run has begun the phases sft, dmd2" in back.err


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"phases__dmd2__optimizers": [{"kind": "adamw"}]},
            "phases.dmd2.optimizers: there must be exactly one for each trained role (actor, fake), received actor",
        ),
        (
            {"phases__dmd2__rewards": [{"kind": "function", "function": "areno_fn.world.picture_rewards:brightness"}]},
            "phases.dmd2.rewards: flow_dmd2 is generation + none, so no reward is ever asked; remove the rewards, or put "
            "them under `evaluation`",
        ),
        (
            {"phases__r1__rewards": []},
            "phases.r1.rewards: flow_tdm_r1 learns from runtime rewards and needs at least one, for example "
            "{ kind = 'function', function = 'package.module:function' }",
        ),
        (
            {"phases__r1__algorithm__samples": 1, "phases__r1__algorithm__scale": "group"},
            "phases.r1.algorithm.samples: a group of 1 has nothing to be compared with; use at least 2",
        ),
        (
            {"phases__r1__algorithm__teacher_guidance": 1.0, "phases__r1__algorithm__guidance_reward": 2.0},
            "phases.r1.algorithm.guidance_reward: a teacher that is not guided has no guidance to follow; give "
            "teacher_guidance, or remove this",
        ),
        (
            {"phases__r1__algorithm__mixture": 0.0, "phases__r1__algorithm__guidance_reward": 2.0},
            "phases.r1.algorithm.guidance_reward: with mixture = 0 the teacher's guidance has no share of the reward; give "
            "mixture, or remove this",
        ),
        (
            {"phases__r1__algorithm__mixture": 1.0},
            "--set phases.r1.algorithm.mixture=1.0: phases.r1.algorithm.mixture must be a number of at least 0 and below 1, "
            "received the number 1.0",
        ),
        (
            {"phases__r1__algorithm__slow": {"start": 0.6}},
            "phases.r1.algorithm.slow.start: a share that begins at 0.6 is above its largest, cap = 0.5; lower it, or raise cap",
        ),
        (
            {"phases__r1__algorithm__combine": "each", "phases__r1__algorithm__scale": "none"},
            "phases.r1.algorithm.scale: with combine = 'each' rewards are compared within groups and scaled over the batch; "
            "remove this",
        ),
        (
            {"phases__r1__batch__micro_rows": 2},
            "phases.r1.batch.micro_rows: the 3 samples of a group are compared in one micro-batch; use at least 3, or 0",
        ),
        (
            {"phases__dmd2__algorithm__low": 0.99},
            "phases.dmd2.algorithm.low: levels are drawn from 0.99 to 0.98, which are none; lower it",
        ),
        (
            {"phases__sft__algorithm__condition_dropout": 0.0, "phases__r1__algorithm": {"kind": "flow_tdm_r1"},
             "phases__opd__algorithm": {"kind": "flow_distill", "teacher": "there"}},
            "phases.tdm.algorithm.teacher_guidance: nothing has taught digits_dit from scratch what to make without a "
            "condition; give a flow_sft phase before it a condition_dropout, or set this to 1",
        ),
        (
            {"phases__opd__algorithm__teacher_guidance": 1.0},
            "phases.opd.algorithm.teacher: without a folder the teacher is the student as it begins, from which there is "
            "nothing to learn; give a folder, or another teacher_guidance than the student's",
        ),
        (
            {"phases__opd__algorithm__denoising": {"steps": 2, "level": 0.5}},
            "phases.opd.algorithm.denoising.level: it is 0.5, but the dynamics 'ode' adds no noise; remove level",
        ),
        (
            {"phases__opd__algorithm__denoising": {"dynamics": "cps", "level": 1.5},
             "phases__opd__algorithm__space": "gaussian"},
            "phases.opd.algorithm.denoising.level: the dynamics 'cps' takes levels up to 1, received 1.5",
        ),
        (
            {"phases__opd__algorithm__denoising": {"dynamics": "flow_sde", "level": 0.5}},
            "phases.opd.algorithm.space: steps by 'flow_sde' are compared in 'gaussian', received 'velocity'",
        ),
        (
            {"phases__opd__algorithm__denoising": {"dynamics": "flow_sde", "level": 0.5, "steps": 1},
             "phases__opd__algorithm__space": "gaussian"},
            "phases.opd.algorithm.denoising.steps: the last step adds no noise, so that of 1 there is nothing to learn; use "
            "at least 2",
        ),
        (
            {"phases__tdm__offload": ["reference"], "phases__tdm__algorithm__teacher": "no/such/folder"},
            "phases.tdm.offload: this phase keeps no 'reference'; it keeps 'ema'",
        ),
        (
            {"phases__tdm__algorithm__teacher": "no/such/folder"},
            "phases.tdm.algorithm.teacher: no/such/folder is not there; a Hugging Face folder is needed",
        ),
        (
            {"export__roles": ["critic"]},
            "export.roles.0: beside the actor, which is always written, this run trains fake and surrogate; remove 'critic'",
        ),
        (
            {"evaluation": "null", "phases__tdm__ema": "null"},
            "phases.dmd2.denoising: it is how evaluations draw, and there is none; give an `evaluation`, or remove this",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_sentence(
    values: dict[str, Any], sentence: str, spec: Path, tmp_path: Path
) -> None:
    assert tiny.run(spec, tmp_path / "out", **values).refused == [sentence]


def test_a_teacher_makes_what_the_actor_makes(whole: Path, spec: Path, tmp_path: Path) -> None:
    teacher = shutil.copytree(whole / "export", tmp_path / "teacher")
    done = tiny.run(
        spec,
        tmp_path / "out",
        model__config__num_embeds_ada_norm=11,
        phases__dmd2__algorithm__teacher=str(teacher),
    )
    assert done.code == 2
    assert "phases.dmd2.algorithm.teacher: " in done.err
    assert "makes [1, 8, 8] of 10 classes, but the actor [1, 8, 8] of 11 classes" in done.err


def test_every_data_set_may_have_a_teacher_of_its_own(whole: Path, spec: Path, tmp_path: Path) -> None:
    """Two folders are two roles, however often they are named; a killed run of them continues bit for bit."""
    first = shutil.copytree(whole / "export", tmp_path / "first")
    second = shutil.copytree(whole / "export", tmp_path / "second")
    text = SPEC[: SPEC.index('[[phases]]\nname = "tdm"')] + SPEC[SPEC.index('[[phases]]\nname = "opd"') :]
    tiny.write_spec(tmp_path, text)
    teachers = [{"path": str(first), "data": ["even"]}, {"path": str(second), "data": ["odd"]}]
    named: dict[str, Any] = {
        "phases__dmd2__algorithm__teacher": str(second),
        "phases__opd__algorithm__teachers": teachers,
        "phases__opd__data": [
            {"kind": "digits", "limit": 10, "name": "even"},
            {"kind": "digits", "split": "heldout", "limit": 10, "name": "odd"},
        ],
        "checkpoint__every": 1,
    }
    done = tiny.run(spec, tmp_path / "out", **named)
    assert (done.code, done.err) == (0, "")
    frozen = {"teacher", "teacher_2"}
    roles = read_manifest(tiny.last_checkpoint(tmp_path / "out")).roles
    assert roles is not None and {role.name for role in roles if not role.trainable} == frozen
    assert {role.name for role in roles} == {"actor", "fake"} | frozen
    with pytest.MonkeyPatch.context() as patch:
        die_after(patch, "save", 7)
        with pytest.raises(Killed):
            tiny.run(spec, tmp_path / "again", **named)
    assert tiny.run(spec, tmp_path / "again", "--resume", **named).code == 0
    assert tiny.difference(tmp_path / "out", tmp_path / "again") is None
    teachers.reverse()
    other = tiny.run(spec, tmp_path / "out", "--resume", **named)
    assert other.code == 2 and "phases.opd.algorithm.teachers.0" in other.err


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"teacher": "one"},
            "phases.opd.algorithm.teacher: it is one for all data sets, and `teachers` are given; remove one of them",
        ),
        (
            {"teachers": [{"path": "one", "data": ["digit"]}]},
            "phases.opd.algorithm.teachers.0.data: there is no data set 'digit' in phases.opd.data; those there are called digits",
        ),
        (
            {"teachers": [{"path": "one", "data": ["digits"]}, {"path": "two", "data": ["digits"]}]},
            "phases.opd.algorithm.teachers: the data set 'digits' has 2 of them; name it in the `data` of one",
        ),
        (
            {},
            "phases.opd.algorithm.teachers.0.path: one is not there; a Hugging Face folder is needed",
        ),
    ],
)  # fmt: skip
def test_what_several_teachers_cannot_mean_is_refused(
    values: dict[str, Any], sentence: str, spec: Path, tmp_path: Path
) -> None:
    algorithm = {"kind": "flow_distill", "teachers": [{"path": "one", "data": ["digits"]}]} | values
    done = tiny.run(
        spec,
        tmp_path / "out",
        phases__opd__algorithm=algorithm,
        phases__opd__data=[{"kind": "digits", "name": "digits"}],
    )
    assert done.refused[0] == sentence
