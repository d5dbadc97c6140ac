"""Every mistake of a user is one sentence and exit code 2; it is found before a weight is read and leaves nothing behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from e2e import bad_inputs, tiny
from e2e.bad_inputs import MORE, NO_CUDA, TWELVE, Case
from e2e.bad_roles import ALL

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.execution import Acquisition, ExecutionContract, Feedback
from areno_fn.run import command

CASES = [*TWELVE, *MORE, *ALL]


def never_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test when a weight is read or drawn."""

    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were touched")

    monkeypatch.setattr("areno_fn.engine.model.ModelPlan.load", load)
    monkeypatch.setattr("areno_fn.ckpt.tensorfile.Reader.read", load)
    monkeypatch.setattr("areno_fn.ckpt.load.stream", load)


def check(case: Case, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before: dict[str, bytes] = {}

    def prepare(home: Path) -> list[str]:
        words = case.prepare(home)
        before.update(tiny.files(home))
        never_load(monkeypatch)
        return words

    code, said = bad_inputs.sentence(Case(case.name, prepare, case.sentence, case.command), home)
    sentence = "error: " + case.sentence.replace("{at}", "WORK")
    assert code == 2
    assert re.fullmatch(f"{sentence}\n", said), said
    after = tiny.files(home)
    caches = [name for name in after if "__pycache__" in name]  # of a reward's module
    assert {name: data for name, data in after.items() if name not in caches} == before
    assert "out" in {name.split("/")[0] for name in before} or not (home / "out").exists()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_S7_a_mistake_is_one_sentence_before_weights_and_leaves_nothing(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(case, tmp_path, monkeypatch)
    assert capsys.readouterr().out == ""


def test_a_gpu_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check(NO_CUDA, tmp_path, monkeypatch)


def test_S8_a_dry_run_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, case in enumerate(CASES):
        if case.command is not command:
            continue
        home = tmp_path / str(number)
        home.mkdir()
        words = case.prepare(home)
        monkeypatch.chdir(home)
        dry = tiny.in_process([*words, "--dry-run"])
        if "/proc/" in case.sentence:  # only writing shows it
            assert dry.code == 0
            continue
        if case.name == "a run in the output folder":  # nothing is written, so it is told and not refused
            assert dry.code == 0 and "  to run it: " in dry.out and "already holds a run (checkpoints)" in dry.out
            continue
        assert dry.code == 2, case.name
        assert re.fullmatch(f"error: {case.sentence}\n".replace("{at}", re.escape(str(home))), dry.err), dry.err


@pytest.mark.parametrize(
    "name", ["a wrong field", "an output folder that cannot be written", "an illegal pair of acquisition and feedback"]
)
def test_a_process_ends_with_2_and_the_sentence_alone(name: str, tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.name == name]
    words = case.prepare(tmp_path)
    before = tiny.files(tmp_path)
    done = tiny.in_subprocess(words, tmp_path)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(f"error: {case.sentence}\n".replace("{at}", re.escape(str(tmp_path))), done.err), done.err
    assert tiny.files(tmp_path) == before


def test_a_specification_that_does_not_decode_costs_no_import_of_torch(tmp_path: Path) -> None:
    words = TWELVE[0].prepare(tmp_path)
    code = (
        "import sys\nfrom areno_fn.command import main\nfrom areno_fn.run import command\n"
        f"code = main(command, {words!r})\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tiny.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr


def test_C1_C5_a_data_set_is_not_judged_at_run_time() -> None:
    with pytest.raises(SpecError, match=r"'dataset' cannot be paired with feedback 'runtime_reward'; legal pairs are"):
        ExecutionContract(acquisition=Acquisition.DATASET, feedback=Feedback.RUNTIME_REWARD)


def test_several_mistakes_are_a_sentence_each(tmp_path: Path) -> None:
    wrong = bad_inputs.spec(
        phases__sft__steps=0, phases__grpo__rewards=[], phases__grpo__algorithm__samples=1, evaluation__rewards=[]
    )
    done = tiny.in_process(wrong(tmp_path))
    assert done.code == 2
    places = [line.split(": ")[1] for line in done.err.splitlines()]
    assert places == ["phases.sft", "phases.grpo.rewards", "phases.grpo.algorithm.samples", "evaluation.rewards"]
    assert all(line.startswith("error: ") for line in done.err.splitlines())


# ------------------------------------------------------------------------------------ found while it runs


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "raise LookupError('no such\\n answer')",
            r"failed on row 0 \(arithmetic\(1 digits, train, seed 0\):\d+\): LookupError: no such answer",
        ),
        (
            "return [row['weight'] for row in rows]",
            r"failed on row 0 \(.*\): KeyError: 'weight'; the row has answer, prompt, response",
        ),
        ("return [1.0]", r"returned 1 values for 16 completions; return one number for each"),
        ("return None", r"returned a NoneType; return a list of numbers"),
        ("return ['1'] * len(rows)", r"returned a str for row 0 \(.*\); it must be a number"),
        ("return [0.0, float('nan')] * 8", r"returned nan for row 1 \(.*\); it must be finite.*"),
        ("import sys; sys.exit(7)", r"failed on row 0 \(.*\): SystemExit: 7"),
        ("return rewards(rows)", r"failed on row 0 \(.*\): NameError: name 'rewards' is not defined"),
    ],
)
def test_a_reward_that_fails_at_run_time_is_named_with_its_row(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"runtime_rewards_{request.node.callspec.indices['body']}"
    (tmp_path / f"{name}.py").write_text(f"def judge(rows, completions):\n    {body}\n")
    words = bad_inputs.spec(phases__grpo__rewards__0__function=f"{name}:judge", evaluation=None)(tmp_path)
    done = tiny.in_process(words)
    assert done.code == 2
    assert re.fullmatch(f"error: the reward 'short' {said}\n", done.err), done.err
    assert tiny.last_checkpoint(tmp_path / "out").name == "step-00000004"


def test_of_a_batch_the_row_is_named_that_the_reward_cannot_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards_but_c.py").write_text(
        "def judge(rows, completions):\n    return [1.0 / (row['prompt'] != 'c') for row in rows]\n"
    )
    text = "".join(f'{{"prompt": "{letter}"}}\n' for letter in "abcd")
    reward = {"phases__grpo__rewards__0__function": "rewards_but_c:judge", "evaluation": None}
    done = tiny.in_process(bad_inputs.rows(text, bad_inputs.GRPO_DATA, **reward)(tmp_path))
    assert done.code == 2
    assert re.fullmatch(
        rf"error: the reward 'short' failed on row \d+ \({re.escape(str(tmp_path))}/rows\.jsonl:3\): "
        r"ZeroDivisionError: float division by zero\n",
        done.err,
    ), done.err


def test_a_reward_with_another_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one_argument.py").write_text("def judge(rows):\n    return []\n")
    words = bad_inputs.spec(phases__grpo__rewards__0__function="one_argument:judge", evaluation=None)(tmp_path)
    done = tiny.in_process(words)
    assert done.code == 2
    assert done.err == (
        "error: phases.grpo.rewards: the reward 'one_argument:judge' does not say what it is to be called with (its parameters "
        "are (rows)); it must have the parameters (rows, completions), (row, completions) or (row, completion), in any order, "
        "and a default for every other\n"
    )
    assert not (tmp_path / "out").exists()


def test_tied_tensors_that_differ_are_found_when_they_are_read(tmp_path: Path) -> None:
    def untie(path: Path) -> None:
        bad_inputs.configured(tie_word_embeddings=True)(path)

    done = tiny.in_process(bad_inputs.folder(untie)(tmp_path))
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert "lm_head.weight" in line and "model.embed_tokens.weight" in line
    assert tiny.files(tmp_path / "out") == {}
