"""Every way in which a specification can be wrong, with the words of its sentence."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
import yaml

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import AdamWSpec, AlgorithmSpec, FunctionReward, HFModel, RunSpec, ScratchModel
from areno_fn.engine import specfile
from areno_fn.spec import command

ROOT = Path(__file__).parents[2]
PLAIN = "; a specification holds text, finite numbers, booleans, lists and tables with text keys"
EMPTY = "the file is empty; `python -m areno_fn.spec new FILE.toml` writes one to start from"


def listed(kinds: list[str]) -> str:
    return f"{', '.join(map(repr, kinds[:-1]))} or {kinds[-1]!r}"


ALGORITHMS = get_args(AlgorithmSpec)
KINDS = listed([kind.__struct_config__.tag for kind in ALGORITHMS])
SAMPLING = listed([kind.__struct_config__.tag for kind in ALGORITHMS if "samples" in kind.__struct_fields__])
assert KINDS.startswith("'sft', 'dpo', 'grpo', 'gspo', 'ppo', 'flow_sft', ") and SAMPLING.startswith("'grpo', 'gspo', ")
BASE = """
model: {kind: hf, path: models/tiny}
phases:
  - name: sft
    steps: 3
    algorithm: {kind: sft}
    data: [{kind: jsonl, path: rows.jsonl}]
    optimizers: [{kind: adamw, lr: 0.001}]
  - name: grpo.v2
    steps: 4
    algorithm: {kind: grpo, sampling: {max_tokens: 8}}
    data: [{kind: arithmetic}]
    rewards: [{function: "m:f", name: exact}, {function: "m:g"}]
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").write_text(BASE)
    return tmp_path / "spec.yaml"


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        specfile.read(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text.removeprefix(f"{path}: ")


def written(tmp_path: Path, name: str, text: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def changed(tmp_path: Path, old: str, new: str) -> str:
    """The sentence about the base specification with one piece of its text replaced."""
    assert BASE.count(old) == 1
    return refused(written(tmp_path, "changed.yaml", BASE.replace(old, new)))


def test_a_good_file_is_read_with_its_defaults(base: Path) -> None:
    spec = specfile.read(base)
    assert [phase.name for phase in spec.phases] == ["sft", "grpo.v2"]
    assert spec.phases[0].optimizers[0] == AdamWSpec(lr=1e-3)
    assert (spec.version, spec.seed, spec.tokenizer) == (2, 0, None)


# ------------------------------------------------------------------------------------------ fields and values


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("steps: 3", "stepz: 3", "phases.sft has no field 'stepz'; the nearest is 'steps'"),
        ("steps: 3", "lr: 3", "phases.sft has no field 'lr'; a field of that name stands under phases.optimizers"),
        (
            "steps: 3",
            "foo: 3",
            "phases.sft has no field 'foo'; "
            "its fields are name, algorithm, data, steps, epochs, stop_at, denoising, batch, optimizers, rewards, ema, offload, "
            "remat, capture",
        ),
        ("model:", "modle: 1\nmodel:", "the specification has no field 'modle'; the nearest is 'model'"),
        (
            "{kind: sft}",
            "{kind: sft, samples: 2}",
            "phases.sft.algorithm has no field 'samples', "
            f"as it is of kind 'sft'; remove it, or take a kind that has it, {SAMPLING}",
        ),
        ("path: models/tiny", "dtype: source", "model lacks 'path', which must be text that is not empty"),
        (
            "model: {kind: hf, path: models/tiny}",
            "seed: 1",
            "the specification lacks 'model', which must be a table with kind 'scratch' or 'hf'",
        ),
        ("{kind: sft}", "{}", f"phases.sft.algorithm lacks 'kind', which must be {KINDS}"),
        (
            "{kind: sft}",
            "{kind: a2c}",
            f"phases.sft.algorithm.kind must be {KINDS}, received the text 'a2c'",
        ),
        (
            "{kind: sft}",
            "{kind: grop}",
            f"phases.sft.algorithm.kind must be {KINDS}, received the text 'grop'; the nearest is 'grpo'",
        ),
        (
            "{kind: adamw,",
            "{kind: adam,",
            "phases.sft.optimizers.actor.kind must be 'adamw', 'adamw8bit', 'sgd' or 'muon', received the text 'adam'",
        ),
        (
            "algorithm: {kind: sft}",
            "algorithm: sft",
            f"phases.sft.algorithm must be a table with kind {KINDS}, received the text 'sft'",
        ),
        ("lr: 0.001", "lr: -1", "phases.sft.optimizers.actor.lr must be a number above 0 and at most 1000, received the number -1"),
        (
            "lr: 0.001",
            "betas: [0.9]",
            "phases.sft.optimizers.actor.betas must be a list of 2, each a number of at least 0 and below 1, "
            "received a list of 1",
        ),
        (
            "lr: 0.001",
            "betas: [0.9, 1]",
            "phases.sft.optimizers.actor.betas.1 must be a number of at least 0 and below 1, received the number 1",
        ),
        ("path: models/tiny", "path: ''", "model.path must be text that is not empty, received the text ''"),
        (
            "{kind: arithmetic}",
            "{kind: jsonl, path: a, columns: {a: b, c: 1}}",
            "phases.grpo.v2.data.0.columns.c must be text, received the number 1; put it in quotes",
        ),
        (
            "path: models/tiny",
            "path: models/tiny, pipeline: {parts: {vae: x, text_encoder: ''}}",
            "model.pipeline.parts.text_encoder must be text that is not empty, received the text ''",
        ),
        ("steps: 3", "steps: -3", "phases.sft.steps must be an integer from 0 to 1000000000, received the number -3"),
        (
            "steps: 3",
            "steps: 1.0e+3",
            "phases.sft.steps must be an integer from 0 to 1000000000, received the number 1000.0; "
            "write 1000, without a point or exponent",
        ),
        ("steps: 3", "steps: true", "phases.sft.steps must be an integer from 0 to 1000000000, received true"),
        ("steps: 3", "steps:", "phases.sft.steps must be an integer from 0 to 1000000000, received nothing"),
        (
            "{kind: arithmetic}",
            "{kind: arithmetic, digits: 7}",
            "phases.grpo.v2.data.0.digits must be an integer from 1 to 6, received the number 7",
        ),
        (
            "function: \"m:g\"",
            "function: 3",
            "phases.grpo.v2.rewards.1.function must be text, received the number 3; put it in quotes",
        ),
        (
            "name: exact",
            "name: no",
            "phases.grpo.v2.rewards.0.name must be text, received false; "
            "YAML reads yes, no, on and off as true and false, so put the word in quotes",
        ),
        (
            "name: sft",
            "name: my sft",
            "phases.my sft.name must be text of letters, digits, '_', '.' and '-', received the text 'my sft'",
        ),
        ("model:", "log: {tensorboard: 'yes'}\nmodel:",
         "log.tensorboard must be true or false, received the text 'yes'; write true without quotes"),
        ("model:", "device: gpu\nmodel:", "device must be 'auto', 'cpu' or 'cuda', received the text 'gpu'"),
        ("model:", "seed: 9223372036854775808\nmodel:", "seed holds a whole number that does not fit 64 bits" + PLAIN),
        ("lr: 0.001", "lr: .inf", "phases.sft.optimizers.actor.lr holds the number inf" + PLAIN),
        ("lr: 0.001", "1: 2", "phases.sft.optimizers.actor holds the key 1, which is not text" + PLAIN),
        ("model:", "version: 3\nmodel:", "version 3 is newer than this release reads, which is 1 or 2; update areno_fn to run it"),
        ("model:", "version: 0\nmodel:", "version must be 1 or 2, received the number 0"),
        ("model:", "version: '1'\nmodel:", "version must be 1 or 2, received the text '1'"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_what_would_be_right(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    assert changed(tmp_path, old, new) == sentence


def test_a_reward_of_this_version_names_its_kind(tmp_path: Path) -> None:
    path = written(tmp_path, "s.yaml", "version: 2" + BASE)
    assert (
        refused(path)
        == "phases.grpo.v2.rewards.exact lacks 'kind', which must be 'function', 'model', 'clip' or 'http'"
    )
    kinds = BASE.replace('{function: "m:f"', "{kind: model, path: judge").replace(
        '{function: "m:g"', '{kind: function, function: "m:g"'
    )
    path.write_text("version: 2" + kinds)
    assert [type(reward).__name__ for reward in specfile.read(path).phases[1].rewards] == [
        "ModelReward",
        "FunctionReward",
    ]
    other = specfile.read(
        path, ["phases.grpo.v2.rewards.exact.kind=function", "phases.grpo.v2.rewards.exact.function=m:h"]
    )
    assert other.phases[1].rewards[0] == FunctionReward(function="m:h", name="exact")


def test_phases_must_not_be_empty(tmp_path: Path) -> None:
    path = written(tmp_path, "s.json", '{"model": {"kind": "hf", "path": "x"}, "phases": []}')
    assert refused(path) == "phases must be a list of at least 1, received a list of 0"


def test_items_that_share_a_name_go_by_their_index(tmp_path: Path) -> None:
    path = written(tmp_path, "s.yaml", BASE.replace("name: grpo.v2", "name: sft").replace("steps: 3", "steps: x"))
    assert refused(path).startswith("phases.0.steps must be")


# ------------------------------------------------------------------------------------------ numbers as text


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("1e-6", "; YAML takes a number for text unless it has a point and a signed exponent, so write 1.0e-6"),
        ("1.5e6", "; YAML takes a number for text unless it has a point and a signed exponent, so write 1500000.0"),
        ("3e20", "; YAML takes a number for text unless it has a point and a signed exponent, so write 3.0e+20"),
        ('"0.001"', "; write 0.001 without quotes"),
        ("fast", ""),
    ],
)
def test_O11_a_number_that_yaml_reads_as_text_is_an_error_that_says_how_to_write_it(
    tmp_path: Path, text: str, advice: str
) -> None:
    sentence = changed(tmp_path, "lr: 0.001", f"lr: {text}")
    shown = text.strip('"')
    assert (
        sentence
        == f"phases.sft.optimizers.actor.lr must be a number above 0 and at most 1000, received the text {shown!r}{advice}"
    )


def test_O11_the_advised_spelling_is_read_as_the_number(tmp_path: Path) -> None:
    for text, value in (("1.0e-6", 1e-6), ("3.0e+2", 300.0)):
        path = written(tmp_path, "s.yaml", BASE.replace("lr: 0.001", f"lr: {text}"))
        assert specfile.read(path).phases[0].optimizers[0].lr == value
        assert yaml.safe_load(text) == value


def test_O11_the_same_in_toml_asks_for_no_quotes(tmp_path: Path) -> None:
    spec = specfile.text(specfile.STARTERS["sft"]()).replace("lr = 1e-05", 'lr = "1e-6"')
    sentence = refused(written(tmp_path, "s.toml", spec))
    assert sentence.endswith(
        "lr must be a number above 0 and at most 1000, received the text '1e-6'; write 1e-6 without quotes"
    )


def test_O11_a_count_given_as_text_is_never_repeated_text(tmp_path: Path) -> None:
    """`"8" * 2` is `"88"` where types are not checked."""
    assert changed(tmp_path, "steps: 3", 'steps: "8"').endswith("received the text '8'; write 8 without quotes")


def test_an_integer_serves_as_a_number(tmp_path: Path) -> None:
    spec = specfile.read(written(tmp_path, "s.yaml", BASE.replace("lr: 0.001", "lr: 1")))
    assert spec.phases[0].optimizers[0].lr == 1.0
    assert type(spec.phases[0].optimizers[0].lr) is float


# ------------------------------------------------------------------------------------------ whole files


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("s.toml", b"a = 1\nb = = 2\n", "not valid TOML: invalid value (at line 2, column 5)"),
        ("s.toml", b"a = 1\na = 2\n", "not valid TOML: cannot overwrite a value (at line 2, column 6)"),
        ("s.json", b'{"a": 1,\n "b" 2}', "not valid JSON: expecting ':' delimiter (at line 2, column 6)"),
        ("s.json", b'{"a": 1, "a": 2}', "not valid JSON: the key 'a' appears twice in one table"),
        ("s.json", b'{"a": NaN}', "not valid JSON: NaN is not a JSON number"),
        ("s.yaml", b"a: 1\nb: [1,\n", "not valid YAML: expected the node content, but found '<stream end>' (at line 3, column 1)"),
        ("s.yaml", b"a: 1\na: 2\n", "not valid YAML: the key 'a' appears twice in one table (at line 2, column 1)"),
        ("s.yaml", b"a: !!python/name:os.system x\n",
         "not valid YAML: the tag 'tag:yaml.org,2002:python/name:os.system' is not allowed here (at line 1, column 4)"),
        ("s.yaml", b"a: !!int maybe\n",
         "not valid YAML: the tag 'tag:yaml.org,2002:int' is not allowed here (at line 1, column 4)"),
        ("s.yml", b"a: &x [*x]\n", "a.0 holds a table that contains itself" + PLAIN),
        ("s.msgpack", b"\x81\xa1a", "not valid MessagePack: input data was truncated"),
        ("s.msgpack", b"\x81\xa1a\x01\x01", "not valid MessagePack: trailing characters (byte 4)"),
        ("s.msgpack", b"\x81\xa1a\xc4\x01x", "a holds a bytes" + PLAIN),
        ("s.toml", b"a = 2024-01-01\n", "a holds a date" + PLAIN),
        ("s.toml", b'a = "\xff"\n', "not valid TOML: byte 5 is not UTF-8 text"),
        ("s.toml", b"", EMPTY),
        ("s.toml", b"# nothing\n", EMPTY),
        ("s.yaml", b"---\n", EMPTY),
        ("s.json", b" \n", EMPTY),
        ("s.msgpack", b"\x80", EMPTY),
        ("s.json", b"[1, 2]", "a specification must be a table at the top, this file holds a list of 2"),
        ("s.yaml", b"hello", "a specification must be a table at the top, this file holds the text 'hello'"),
        ("s.txt", b"a = 1", "a specification file must end in .toml, .yaml, .yml, .json or .msgpack"),
        ("s.json", b'{"a":' * 100_000, "the file is nested too deeply to be a specification"),
        ("s.yaml", b"a: " + b"[" * 100_000, "the file is nested too deeply to be a specification"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_specification_says_why(tmp_path: Path, name: str, data: bytes, sentence: str) -> None:
    assert refused(written(tmp_path, name, data)) == sentence


def test_a_file_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    missing = refused(tmp_path / "none.toml")
    assert missing == "no such file; `python -m areno_fn.spec new FILE.toml` writes one to start from"
    (tmp_path / "folder.toml").mkdir()
    assert refused(tmp_path / "folder.toml") == "cannot be read: is a directory"


def test_what_looks_like_a_date_in_yaml_is_text(tmp_path: Path) -> None:
    spec = specfile.read(written(tmp_path, "s.yaml", BASE.replace("name: sft", "name: 2024-01-01")))
    assert spec.phases[0].name == "2024-01-01"


def test_a_byte_order_mark_and_windows_lines_are_no_hindrance(tmp_path: Path) -> None:
    spec = specfile.STARTERS["grpo"]()
    for suffix in (".toml", ".yaml", ".json"):
        text = specfile.text(spec, suffix).replace("\n", "\r\n")
        assert specfile.read(written(tmp_path, f"s{suffix}", b"\xef\xbb\xbf" + text.encode())) == spec


# ------------------------------------------------------------------------------------------ overrides


def test_overrides_reach_fields_by_name_role_and_index(base: Path) -> None:
    spec = specfile.read(
        base,
        [
            "seed=1",
            "phases.sft.steps=7",
            "phases.grpo.v2.algorithm.sampling.top_p=0.5",
            "phases.sft.optimizers.actor.lr=1e-4",
            "phases.1.optimizers.actor.lr=2e-4",
            "phases.sft.optimizers.actor.betas.1=0.99",
            "phases.grpo.v2.rewards.exact.weight=2",
            "phases.grpo.v2.rewards.1.weight=3",
            "out=1e-6",
            "log.tensorboard=false",
            "tokenizer.kind=byte",
        ],
    )
    sft, grpo = spec.phases
    assert (spec.seed, sft.steps, spec.out, spec.log.tensorboard) == (1, 7, "1e-6", False)
    assert grpo.algorithm.sampling.top_p == 0.5
    assert grpo.algorithm.sampling.max_tokens == 8
    assert sft.optimizers == [AdamWSpec(lr=1e-4, betas=(0.9, 0.99))]
    assert grpo.optimizers == [AdamWSpec(lr=2e-4)]
    assert [reward.weight for reward in grpo.rewards] == [2.0, 3.0]
    assert type(spec.tokenizer).__name__ == "ByteTokenizer"


def test_an_override_of_one_part_keeps_the_rest_of_an_omitted_default(base: Path) -> None:
    """The default sampling of an evaluation is greedy; the default of the table itself is not."""
    evaluation = 'evaluation={"data": [{"kind": "arithmetic"}], "rewards": []}'
    spec = specfile.read(base, [evaluation, "evaluation.sampling.max_tokens=3"])
    assert spec.evaluation is not None
    assert (spec.evaluation.sampling.temperature, spec.evaluation.sampling.max_tokens) == (0.0, 3)


def test_whole_tables_and_lists_can_be_set(base: Path) -> None:
    toml = 'phases.sft.rewards=[{ function = "m:f", weight = 2.0 }]'
    spec = specfile.read(base, [toml, 'model={"kind": "scratch", "family": "llama", "config": {"a.b": {"c": 1}}}'])
    assert spec.phases[0].rewards[0].weight == 2.0
    changed = specfile.read(
        base,
        [
            'model={"kind": "scratch", "family": "llama", "config": {"a.b": {"c": 1}}}',
            "model.config.a.b.c=2",
            "model.config.new.inner=true",
            "model.config.word=silu",
            "model.config.rope_scaling=null",
        ],
    )
    assert isinstance(changed.model, ScratchModel)
    assert changed.model.config == {"a.b": {"c": 2}, "new": {"inner": True}, "word": "silu", "rope_scaling": None}


def test_of_names_that_begin_alike_the_longest_is_meant(tmp_path: Path) -> None:
    path = written(tmp_path, "s.yaml", BASE.replace("name: sft", "name: grpo"))
    spec = specfile.read(path, ["phases.grpo.steps=5", "phases.grpo.v2.steps=6"])
    assert [phase.steps for phase in spec.phases] == [5, 6]


def test_later_overrides_win(base: Path) -> None:
    assert specfile.read(base, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("phasse.sft.steps=1", "the specification has no field 'phasse'; the nearest is 'phases'"),
        ("phases.sff.steps=1", "phases has no item 'sff'; the nearest is 'sft'"),
        ("phases.9.steps=1", "phases has no item '9'; its items are sft, grpo.v2"),
        ("phases.sft.stepz=1", "phases.sft has no field 'stepz'; the nearest is 'steps'"),
        ("phases.0.stepz=1", "phases.sft has no field 'stepz'; the nearest is 'steps'"),
        (
            "phases.sft.rewards.a.weight=1",
            "phases.sft.rewards has no item 'a'; it is empty; give it whole, phases.sft.rewards=[{ ... }]",
        ),
        (
            "phases.sft.algorithm.sampling.top_k=1",
            "phases.sft.algorithm has no field 'sampling', as it is of kind 'sft'; remove it, "
            "or take a kind that has it, 'grpo', 'gspo' or 'ppo'",
        ),
        ("seed=abc", "seed must be an integer from 0 to 9223372036854775807, received the text 'abc'"),
        ("seed=-1", "seed must be an integer from 0 to 9223372036854775807, received the number -1"),
        ("device=gpu", "device must be 'auto', 'cpu' or 'cuda', received the text 'gpu'"),
        (
            "phases.sft.algorithm.kind=a2c",
            f"phases.sft.algorithm.kind must be {KINDS}, received the text 'a2c'",
        ),
        ("seed.x=1", "seed is the number 0 and has nothing inside"),
        ("model.path.x=1", "model.path is the text 'models/tiny' and has nothing inside"),
        ("seed", "an override is written address=value, for example --set phases.sft.steps=100"),
        ("=3", "an override is written address=value, for example --set phases.sft.steps=100"),
        ("phases..steps=3", "an override is written address=value, for example --set phases.sft.steps=100"),
    ],
)
def test_a_wrong_override_is_blamed_itself(base: Path, override: str, sentence: str) -> None:
    assert refused(base, "name=before", override) == f"--set {override}: {sentence}"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["phases.sft.algorithm.kind=gspo", "phases.sft.algorithm.aggregation=token_mean"],
            "phases.sft.algorithm has no field 'aggregation', as it is of kind 'gspo'; remove it, "
            "or take a kind that has it, 'sft', 'grpo' or 'ppo'",
        ),
        (
            ["phases.sft.optimizers.actor.kind=sgd", "phases.sft.optimizers.actor.betas=[0.9, 0.99]"],
            "phases.sft.optimizers.actor has no field 'betas', as it is of kind 'sgd'; remove it, "
            "or take a kind that has it, 'adamw' or 'adamw8bit'",
        ),
        (
            ["phases.sft.algorithm.kind=grpo", "phases.sft.algorithm.top_k=3"],
            "phases.sft.algorithm has no field 'top_k'; a field of that name stands under phases.sft.algorithm.sampling",
        ),
        (
            ["phases.sft.optimizers.actor.kind=muon", "phases.sft.optimizers.actor.warmup_steps=3"],
            "phases.sft.optimizers.actor has no field 'warmup_steps'; a field of that name stands under "
            "phases.sft.optimizers.actor.schedule",
        ),
    ],
)
def test_a_field_of_other_kinds_is_not_sought_where_it_cannot_be(
    base: Path, overrides: list[str], sentence: str
) -> None:
    assert refused(base, *overrides) == f"--set {overrides[-1]}: {sentence}"


def test_all_that_a_kind_has_not_is_named_at_once_with_what_to_do(tmp_path: Path) -> None:
    text = (ROOT / "specs/flow.toml").read_text().replace('kind = "flow_grpo"', 'kind = "flow_nft"')
    assert refused(written(tmp_path, "s.toml", text)).endswith(
        "phases.grpo.algorithm has no fields 'clip_low', 'clip_high' and 'denoising.level', as it is of kind 'flow_nft'; "
        "remove them, or take a kind that has them, 'flow_grpo' or 'flow_grpo_guard'"
    )


def test_what_a_changed_kind_drops_is_said() -> None:
    heard: list[str] = []
    change = "phases.grpo.algorithm.kind=flow_nft"
    spec = specfile.read(ROOT / "specs/flow.toml", [change], heard.append)
    assert heard == [
        f"--set {change}: phases.grpo.algorithm is without clip_low, clip_high, denoising.level now, "
        "which its kind 'flow_nft' has not"
    ]
    assert (spec.phases[1].algorithm.minibatches, spec.phases[1].algorithm.denoising.steps) == (2, 8)
    specfile.read(ROOT / "specs/flow.toml", ["phases.grpo.algorithm.kind=flow_grpo_guard"], heard.append)
    assert len(heard) == 1
    level = "phases.grpo.algorithm.denoising.level=0.5"
    assert "has no field 'denoising.level', as it is of kind 'flow_nft'; remove it" in refused(
        ROOT / "specs/flow.toml", change, level
    )


def test_a_changed_kind_drops_nothing_that_no_kind_has(tmp_path: Path) -> None:
    text = (ROOT / "specs/flow.toml").read_text().replace("clip_low", "clip_lo")
    sentence = refused(written(tmp_path, "s.toml", text), "phases.grpo.algorithm.kind=flow_nft")
    assert "phases.grpo.algorithm has no field 'clip_lo'" in sentence


def test_the_commands_say_what_a_changed_kind_drops(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", str(ROOT / "specs/flow.toml"), "--set", "phases.grpo.algorithm.kind=flow_awm"]) == 0
    assert capsys.readouterr().err.startswith("note: --set phases.grpo.algorithm.kind=flow_awm: ")


def test_an_override_that_is_not_finite_is_refused(base: Path) -> None:
    override = "phases.sft.optimizers.actor.lr=nan"
    assert refused(base, override) == f"--set {override}: phases.sft.optimizers.actor.lr holds the number nan" + PLAIN


def test_a_table_left_incomplete_by_an_override_blames_both(base: Path) -> None:
    sentence = refused(base, "evaluation.every=3")
    assert sentence == f"{base} with --set evaluation.every=3: evaluation lacks 'data', which must be a list"


# ------------------------------------------------------------------------------------------ specifications built in Python


def test_check_finds_what_constructors_let_pass() -> None:
    good = specfile.STARTERS["sft"]()
    bad = msgspec.structs.replace(good.phases[0], optimizers=[AdamWSpec(lr=-1.0)])
    with pytest.raises(SpecError) as caught:
        specfile.check(msgspec.structs.replace(good, phases=[bad]))
    assert str(caught.value) == (
        "the specification: phases.sft.optimizers.actor.lr must be a number above 0 and at most 1000, received the number -1.0"
    )


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        (np.float64(1.0), "a float64"),
        ({1: 2}, "the key 1, which is not text"),
        (float("nan"), "the number nan"),
        ({1, 2}, "a set"),
        (b"x", "a bytes"),
        ("\ud800", "text with a lone surrogate"),
    ],
)
def test_values_that_no_file_can_hold_are_refused(tmp_path: Path, value: object, wrong: str) -> None:
    good = specfile.STARTERS["quickstart"]()
    spec = msgspec.structs.replace(good, model=ScratchModel(family="llama", config={"x": value}))
    for use in (specfile.check, lambda bad: specfile.write(bad, tmp_path / "s.json")):
        with pytest.raises(SpecError, match=rf"model\.config\.x holds {wrong}; "):
            use(spec)


def test_a_table_that_contains_itself_is_refused() -> None:
    config: dict[str, object] = {}
    config["self"] = config
    spec = msgspec.structs.replace(specfile.STARTERS["quickstart"](), model=ScratchModel(family="llama", config=config))
    with pytest.raises(SpecError, match="contains itself"):
        specfile.check(spec)


# ------------------------------------------------------------------------------------------ writing


def test_toml_cannot_say_null_and_the_other_formats_can(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(
        specfile.STARTERS["quickstart"](), model=ScratchModel(family="llama", config={"rope_scaling": None})
    )
    with pytest.raises(
        SpecError, match=r"model\.config\.rope_scaling is null, which TOML cannot say; leave the key out"
    ):
        specfile.write(spec, tmp_path / "s.toml")
    assert not (tmp_path / "s.toml").exists()
    for suffix in (".yaml", ".json", ".msgpack"):
        specfile.write(spec, tmp_path / f"s{suffix}")
        assert specfile.read(tmp_path / f"s{suffix}") == spec


def test_writing_where_nothing_can_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none/s\.toml: cannot be written: no such file or directory"):
        specfile.write(specfile.STARTERS["sft"](), tmp_path / "none" / "s.toml")


def test_an_invalid_specification_is_not_written(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(specfile.STARTERS["sft"](), phases=[])
    with pytest.raises(SpecError, match="phases must be a list of at least 1"):
        specfile.write(spec, tmp_path / "s.toml")
    assert not (tmp_path / "s.toml").exists()


def test_packed_bytes_do_not_depend_on_the_order_of_keys(tmp_path: Path) -> None:
    good = specfile.STARTERS["quickstart"]()
    for name, config in (("a", {"x": 1, "y": 2}), ("b", {"y": 2, "x": 1})):
        spec = msgspec.structs.replace(good, model=ScratchModel(family="llama", config=config))
        specfile.write(spec, tmp_path / f"{name}.msgpack")
    assert (tmp_path / "a.msgpack").read_bytes() == (tmp_path / "b.msgpack").read_bytes()


def test_written_files_say_every_field(tmp_path: Path) -> None:
    assert "weight_decay = 0.01" in specfile.text(specfile.STARTERS["sft"]())


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 3}, "seed: the number 0 and the number 3"),
        ({"evaluation": None}, "evaluation: a table and nothing"),
        ({"phases": []}, "phases: a list of 1 and a list of 0"),
    ],
)
def test_the_first_difference_is_named(change: dict[str, object], difference: str) -> None:
    one = specfile.STARTERS["grpo"]()
    assert specfile.first_difference(one, one) is None
    assert specfile.first_difference(one, msgspec.structs.replace(one, **change)) == difference


def test_a_difference_inside_a_phase_goes_by_its_name() -> None:
    one = specfile.STARTERS["grpo"]()
    phase = msgspec.structs.replace(one.phases[0], optimizers=[AdamWSpec(lr=0.5)])
    other = RunSpec(**{**{n: getattr(one, n) for n in one.__struct_fields__}, "phases": [phase]})
    assert (
        specfile.first_difference(one, other) == "phases.grpo.optimizers.actor.lr: the number 1e-06 and the number 0.5"
    )


def test_a_table_of_another_kind_keeps_what_this_kind_has(base: Path) -> None:
    overrides = ["model.kind=scratch", "model.family=llama", "model.kind=hf", "model.path=models/other"]
    assert specfile.read(base, overrides).model == HFModel(path="models/other")


@pytest.mark.parametrize("text", ["\x85", "a\u2028b", "\u2029 x"])
def test_line_breaks_of_unicode_survive_yaml(tmp_path: Path, text: str) -> None:
    data = {"kind": "jsonl", "path": text, "columns": {"prompt": text}}
    plain = {
        "model": {"kind": "hf", "path": "m"},
        "phases": [{"name": "a", "algorithm": {"kind": "sft"}, "data": [data]}],
    }
    spec = msgspec.convert(plain, RunSpec)
    specfile.write(spec, tmp_path / "s.yaml")
    assert specfile.read(tmp_path / "s.yaml") == spec
