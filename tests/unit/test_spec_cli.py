"""`python -m areno_fn.spec` from end to end, and the way every command ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from areno_fn.command import main
from areno_fn.contracts import spec as contracts
from areno_fn.contracts.errors import DataError, SpecError
from areno_fn.engine import specfile
from areno_fn.engine.plan import plan
from areno_fn.engine.specfile.commented import commented
from areno_fn.engine.specfile.foreign import FIELDS, medium_of
from areno_fn.engine.specfile.meanings import MEANINGS
from areno_fn.spec import command

KINDS = sorted(specfile.STARTERS)


def run(*arguments: object) -> int:
    return main(command, [str(argument) for argument in arguments])


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    specfile.write(specfile.STARTERS["grpo"](), tmp_path / "spec.toml")
    return tmp_path / "spec.toml"


# ------------------------------------------------------------------------------------------ new


@pytest.mark.parametrize("kind", KINDS)
def test_new_writes_a_specification_that_checks(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine.toml"
    assert run("new", "--kind", kind, target) == 0
    assert run("check", target) == 0
    assert specfile.read(target) == specfile.STARTERS[kind]()
    assert f"OK {target}: {kind}, phases " in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_what_new_shows_behind_a_mark_is_the_default(kind: str) -> None:
    text = specfile.commented(specfile.STARTERS[kind]())
    shown = re.sub(r"^#(?=\w+ = )", "", text, flags=re.MULTILINE)
    assert shown != text
    assert msgspec.convert(tomllib.loads(shown), contracts.RunSpec) == specfile.STARTERS[kind]()


@pytest.mark.parametrize("kind", KINDS)
def test_new_shows_every_field_of_every_table_with_its_meaning(kind: str) -> None:
    spec, text = specfile.STARTERS[kind](), specfile.commented(specfile.STARTERS[kind]())
    tables = [
        spec,
        spec.model,
        *filter(None, [getattr(spec.model, "pipeline", None)]),
        spec.checkpoint,
        spec.export,
        spec.log,
        *spec.phases,
    ]
    tables += [part for phase in spec.phases for part in (phase.algorithm, phase.batch, *phase.data, *phase.optimizers)]
    drawn = [phase.algorithm for phase in spec.phases]
    drawn += [spec.evaluation] if medium_of(spec) == "pictures" else []
    tables += [part for table in drawn if (part := getattr(table, "denoising", None))]
    foreign = FIELDS[medium_of(spec)]
    for table in tables:
        for field in set(table.__struct_fields__) - set(foreign.get(type(table), ())):
            assert re.search(rf"^#?\[?\[?(\w+\.)*{field}\b.*# .", text, re.MULTILINE) or field == "config", field
            assert MEANINGS[type(table).__name__][field] in text


@pytest.mark.parametrize("kind", KINDS)
def test_new_shows_nothing_that_is_refused_for_what_its_model_makes(kind: str, tmp_path: Path) -> None:
    spec = specfile.STARTERS[kind]()
    shown = tomllib.loads(re.sub(r"^#(?=\w+ = |\[)", "", specfile.commented(spec), flags=re.MULTILINE))
    for table, names in FIELDS[medium_of(spec)].items():
        places = {
            contracts.RunSpec: [shown],
            contracts.HFModel: [shown["model"]],
            contracts.Phase: shown["phases"],
            contracts.Batch: [phase["batch"] for phase in shown["phases"]],
            contracts.Evaluation: [shown.get("evaluation", {})],
        }[table]
        for place in places:
            assert not set(place) & set(names), (table, names)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("quickstart", "phases.0.denoising.steps=3 phases.0.batch.micro_rows=2 evaluation.denoising.steps=3"),
        ("flow", "phases.0.capture=true phases.0.batch.micro_tokens=5 phases.0.batch.max_length=5"),
        (
            "flow",
            "phases.0.batch.overlong=drop evaluation.sampling.max_tokens=5 tokenizer.kind=byte consistency=bitwise",
        ),
    ],
)
def test_what_new_leaves_out_is_refused_for_what_its_model_makes(kind: str, wrong: str, tmp_path: Path) -> None:
    specfile.write(specfile.STARTERS[kind](), tmp_path / "spec.toml")
    for override in wrong.split():
        with pytest.raises(SpecError):
            plan(specfile.read(tmp_path / "spec.toml", [override, "device=cpu"]))


def test_every_choice_of_a_kind_is_of_the_medium() -> None:
    text, pictures = (specfile.commented(specfile.STARTERS[kind]()) for kind in ("grpo", "flow"))
    assert '# "sft" | "dpo" | "grpo" | "gspo" | "ppo"\n' in text and '"flow_' not in text
    assert '# "jsonl" | "parquet" | "hf" | "arithmetic"\n' in text and '# "function" | "model" | "http"\n' in text
    assert '# "digits" | "digit_pairs"\n' in pictures and '# "function" | "clip" | "http"\n' in pictures
    assert '# "flow_sft" | "flow_dpo" | ' in pictures and '"sft" | "dpo"' not in pictures
    assert '# "jsonl" | "parquet" | "hf"\n' in specfile.commented(specfile.STARTERS["pipeline"]())


def test_every_field_of_a_specification_has_a_meaning_and_nothing_else_has() -> None:
    def of(base: type) -> list[type]:
        return [found for child in base.__subclasses__() for found in (child, *of(child))]

    tables = [struct for struct in of(contracts.Spec) if not struct.__subclasses__()]
    declared = {struct.__name__: set(struct.__struct_fields__) for struct in tables}  # type: ignore[attr-defined]
    assert {name: set(fields) for name, fields in MEANINGS.items()} == {n: f for n, f in declared.items() if f}


def test_free_tables_keep_their_place(tmp_path: Path) -> None:
    good = specfile.STARTERS["quickstart"]()
    config = {"hidden_size": 8, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    spec = msgspec.structs.replace(good, model=contracts.ScratchModel(family="llama", config=config))
    (tmp_path / "s.toml").write_text(specfile.commented(spec))
    assert specfile.read(tmp_path / "s.toml") == spec


def test_new_replaces_nothing_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine.toml"
    target.write_text("precious")
    assert run("new", target) == 2
    assert capsys.readouterr().err == f"error: {target}: the file exists; pass --force to replace it, or name another\n"
    assert target.read_text() == "precious"
    assert run("new", target, "--force") == 0
    assert specfile.read(target).name == "sft"


def test_new_writes_toml_only_and_says_where_it_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("new", tmp_path / "mine.yaml") == 2
    assert run("new", tmp_path / "none" / "mine.toml") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("a new specification is commented TOML, so its name must end in .toml")
    assert second.endswith("mine.toml: cannot be written: no such file or directory")


# ------------------------------------------------------------------------------------------ pack, unpack, check, show


def test_pack_and_unpack_are_inverse(toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pack", toml) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'spec.msgpack'}\n"
    assert run("unpack", tmp_path / "spec.msgpack", tmp_path / "again.yaml") == 0
    assert specfile.read(tmp_path / "again.yaml") == specfile.read(toml)
    assert run("pack", tmp_path / "again.yaml") == 0
    assert (tmp_path / "again.msgpack").read_bytes() == (tmp_path / "spec.msgpack").read_bytes()


def test_unpack_does_not_replace_the_commented_original(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("pack", toml)
    before = toml.read_text()
    assert run("unpack", toml.with_suffix(".msgpack")) == 2
    assert "the file exists; pass --force" in capsys.readouterr().err
    assert toml.read_text() == before
    assert run("unpack", toml.with_suffix(".msgpack"), "--force") == 0


def test_pack_and_unpack_mind_the_suffix(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pack", toml, toml.with_suffix(".json")) == 2
    assert run("unpack", toml) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("spec.json: what is packed must end in .msgpack")
    assert second.endswith("spec.toml: what is unpacked must end in .msgpack")


def test_check_goes_through_all_files_and_fails_for_one(
    toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text(toml.read_text().replace("lr = 1e-06", 'lr = "1e-6"'))
    assert run("check", bad, toml, tmp_path / "none.toml") == 2
    captured = capsys.readouterr()
    assert captured.out == f"OK {toml}: grpo, phases grpo\n"
    wrong, missing = captured.err.splitlines()
    assert wrong == (
        f"error: {bad}: phases.grpo.optimizers.actor.lr must be a number above 0 and at most 1000, received the text '1e-6'; "
        f"write 1e-6 without quotes"
    )
    assert missing.startswith(f"error: {tmp_path / 'none.toml'}: no such file")


def test_check_packed_compares_with_the_file_beside(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = toml.with_suffix(".msgpack")
    assert run("check", "--packed", toml) == 2
    assert (
        capsys.readouterr().err == f"error: {packed}: no such file; `python -m areno_fn.spec pack {toml}` writes it\n"
    )
    run("pack", toml)
    assert run("check", "--packed", toml) == 0
    toml.write_text(toml.read_text().replace("steps = 100", "steps = 101"))
    capsys.readouterr()
    assert run("check", "--packed", toml) == 2
    assert capsys.readouterr().err == (
        f"error: {toml} and {packed} differ at phases.grpo.steps: the number 101 and the number 100; "
        f"run `python -m areno_fn.spec pack {toml}`\n"
    )


def test_check_and_show_take_overrides(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", toml, "--set", "seed=x") == 2
    assert capsys.readouterr().err.startswith("error: --set seed=x: seed must be an integer")
    assert run("show", toml, "--set", "seed=7", "--set", "phases.grpo.steps=3") == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert (shown["seed"], shown["phases"][0]["steps"], shown["phases"][0]["batch"]["micro_tokens"]) == (7, 3, 8192)


def test_schema_describes_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$defs"]["AdamWSpec"]["properties"]["lr"] == {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": 1000,
        "default": 1e-6,
        "description": "highest learning rate",
    }
    for name, fields in MEANINGS.items():
        assert {f: schema["$defs"][name]["properties"][f]["description"] for f in fields} == fields


def test_usage_errors_and_help_follow_custom(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["frobnicate"], 2), ([], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as ended:
            run(*arguments)
        assert ended.value.code == code
    assert "usage: python -m areno_fn.spec" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ as a process


def process(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "areno_fn.spec", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload,no-any-return]


def test_the_command_runs_as_a_module(tmp_path: Path) -> None:
    done = process("check", tmp_path / "none.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_nothing_here_waits_for_torch(toml: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from areno_fn.spec import command; import pathlib; t = pathlib.Path(sys.argv[1]);"
        "command(['new', str(t / 'n.toml')]); command(['pack', str(t / 'spec.toml')]);"
        "command(['unpack', str(t / 'spec.msgpack'), str(t / 'u.toml')]); command(['schema']);"
        "command(['show', str(t / 'u.toml')]);"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "False\n")


def test_a_reader_that_leaves_early_causes_no_noise() -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "areno_fn.spec", "schema"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


# ------------------------------------------------------------------------------------------ main


def ends(error: BaseException) -> int:
    def function(arguments: Sequence[str]) -> int:
        del arguments
        raise error

    return main(function, [])


def test_a_mistake_is_a_line_for_each_sentence_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(DataError("row 3 has no prompt")) == 2
    assert ends(SpecError("one\n\n  two\n")) == 2
    assert capsys.readouterr().err == "error: row 3 has no prompt\nerror: one\nerror: two\n"


def test_interruption_is_130_and_a_bug_passes_through(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted\n"
    with pytest.raises(ZeroDivisionError):
        ends(ZeroDivisionError())
    with pytest.raises(ValueError, match="no user did this"):
        ends(ValueError("no user did this"))


def test_the_code_of_the_command_is_passed_on() -> None:
    assert [main(lambda _, code=code: code, []) for code in (None, 0, 2)] == [0, 0, 2]  # type: ignore[misc]


def test_arguments_come_from_the_process_when_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(sys, "argv", ["prog", "a", "b"])
    main(lambda arguments: seen.extend(arguments))
    assert seen == ["a", "b"]


def test_the_quickstart_starter_is_the_quickstart_that_is_run() -> None:
    root = Path(__file__).parents[2]
    for kind in ("quickstart", "flow"):
        assert specfile.read(str(root / f"specs/{kind}.toml")) == specfile.STARTERS[kind]()


@pytest.mark.parametrize("columns", [{}, {"prompt": "question", "answer.1": "a b"}])
def test_renamed_columns_are_shown_and_read_back(columns: dict[str, str], tmp_path: Path) -> None:
    spec = specfile.STARTERS["grpo"]()
    phase = spec.phases[0]
    data = [structs.replace(source, columns=columns) for source in phase.data]
    changed = structs.replace(spec, phases=[structs.replace(phase, data=data)])
    path = tmp_path / "s.toml"
    path.write_text(commented(changed))
    assert specfile.read(path) == changed
