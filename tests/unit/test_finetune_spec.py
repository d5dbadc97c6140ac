"""`finetune` in a specification: its spellings, its refusals, and what it makes of a run's identity and roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
import yaml

import areno_fn as af
from areno_fn.contracts.errors import ModelError, SpecError
from areno_fn.contracts.spec import FullFinetune, Lora, RunSpec
from areno_fn.engine import specfile
from areno_fn.engine.composition import check_composition
from areno_fn.engine.finetune import BASE, FullPlan, LoraPlan
from areno_fn.steps.recipes import ACTOR

ROOT = Path(__file__).resolve().parents[2]
PLAIN: dict[str, Any] = {
    "model": {
        "kind": "scratch",
        "family": "llama",
        "config": {
            "vocab_size": 259,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
        },
    },
    "phases": [
        {
            "name": "sft",
            "steps": 1,
            "algorithm": {"kind": "sft"},
            "data": [{"kind": "arithmetic", "count": 4}],
            "batch": {"max_length": 32},
        }
    ],
}
ENCODERS = {
    ".toml": lambda values: tomli_w.dumps(values).encode(),
    ".yaml": lambda values: yaml.safe_dump(values).encode(),
    ".json": msgspec.json.encode,
    ".msgpack": msgspec.msgpack.encode,
}


def read(folder: Path, finetune: Any = None, *overrides: str, suffix: str = ".yaml") -> RunSpec:
    path = folder / f"spec{suffix}"
    path.write_bytes(ENCODERS[suffix](PLAIN if finetune is None else {**PLAIN, "finetune": finetune}))
    return specfile.read(path, overrides)


def refused(folder: Path, finetune: Any, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        check_composition(read(folder, finetune, *overrides))
    return str(caught.value).removeprefix(f"{folder / 'spec.yaml'}: ")


@pytest.mark.parametrize("suffix", ENCODERS)
def test_a_word_is_a_table_of_its_kind_in_every_format(suffix: str, tmp_path: Path) -> None:
    assert read(tmp_path, suffix=suffix).finetune == FullFinetune()
    assert read(tmp_path, "full", suffix=suffix).finetune == FullFinetune()
    assert read(tmp_path, "lora", suffix=suffix).finetune == Lora()
    table = {"kind": "lora", "rank": 4, "targets": ["q_proj"], "rslora": True}
    spec = read(tmp_path, table, suffix=suffix)
    assert spec.finetune == Lora(rank=4, targets=["q_proj"], rslora=True)
    written = tmp_path / f"again{suffix}"
    specfile.write(spec, written)
    assert specfile.read(written) == spec
    assert specfile.check(msgspec.structs.replace(spec, finetune="lora")).finetune == Lora()  # built in Python


def test_overrides_see_a_table_where_a_word_stands(tmp_path: Path) -> None:
    assert read(tmp_path, "lora", "finetune.rank=2").finetune == Lora(rank=2)
    assert read(tmp_path, None, "finetune=lora").finetune == Lora()
    assert read(tmp_path, None, "finetune=lora", "finetune.alpha=1").finetune == Lora(alpha=1.0)
    assert read(tmp_path, {"kind": "lora", "rank": 2}, "finetune=full").finetune == FullFinetune()


@pytest.mark.parametrize(
    ("finetune", "sentence"),
    [
        ("loar", "finetune.kind must be 'full' or 'lora', received the text 'loar'"),
        (3, "finetune must be a table with kind 'full' or 'lora', received the number 3"),
        ({"kind": "lora", "rank": 0}, "finetune.rank must be an integer from 1 to 65536, received the number 0"),
        (
            {"kind": "lora", "alpha": 0},
            "finetune.alpha must be a number above 0 and at most 1000000, received the number 0",
        ),
        ({"kind": "lora", "targets": "q_proj"}, "finetune.targets must be a list, received the text 'q_proj'"),
        (
            {"kind": "lora", "drop_out": 0.1},
            "finetune has no field 'drop_out'; its fields are kind, rank, alpha, targets, rslora, adapter, merge_rollouts",
        ),
        (
            {"kind": "lora", "adapter": "x", "rank": 4},
            "finetune.rank: an adapter that is trained on has its own; remove this, or `adapter`",
        ),
        (
            {"kind": "lora", "targets": ["q_proj", ""]},
            "finetune.targets: a name is empty; leave the list empty to adapt every linear map of the layers",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(finetune: Any, sentence: str, tmp_path: Path) -> None:
    assert refused(tmp_path, finetune) == sentence


def test_the_schema_knows_the_word(tmp_path: Path) -> None:
    accepted = specfile.schema()["$defs"]["RunSpec"]["properties"]["finetune"]["anyOf"]
    assert {"enum": ["full", "lora"]} in accepted


def test_a_specification_written_before_there_were_adapters_still_means_the_same(tmp_path: Path) -> None:
    spec = specfile.read(ROOT / "specs/quickstart.msgpack")
    values = msgspec.msgpack.decode((ROOT / "specs/quickstart.msgpack").read_bytes())
    del values["finetune"]
    old = tmp_path / "old.msgpack"
    old.write_bytes(msgspec.msgpack.encode(values))
    assert specfile.read(old) == spec


def test_a_plan_declares_the_roles_and_finds_the_sites(tmp_path: Path) -> None:
    full = af.plan(read(tmp_path))
    assert isinstance(full.finetune, FullPlan) and full.roles.trainable == (ACTOR,)
    lora = af.plan(read(tmp_path, {"kind": "lora", "rank": 4, "alpha": 2.0, "rslora": True}))
    assert isinstance(lora.finetune, LoraPlan)
    assert [(role.name, role.trainable) for role in lora.roles.roles] == [(ACTOR, True), (BASE, False)]
    shapes = lora.finetune.shapes()
    part = shapes[ACTOR]["model.layers.0.self_attn.v_proj"]
    assert (tuple(part.a.shape), tuple(part.b.shape), part.scale) == ((4, 16), (8, 4), 1.0)  # 2 / sqrt(4)
    assert sorted(lora.finetune.configs[""].target_modules) == sorted({site.name for site in lora.finetune.sites})
    with pytest.raises(ModelError, match=r"finetune\.targets: the model has no module 'c_attn'; its linear maps are "):
        af.plan(read(tmp_path, {"kind": "lora", "targets": ["c_attn"]}))


def test_the_identity_of_a_run_holds_how_it_is_trained(tmp_path: Path) -> None:
    ways: list[Any] = [
        "full",
        "lora",
        {"kind": "lora", "rank": 4},
        {"kind": "lora", "alpha": 1.0},
        {"kind": "lora", "rslora": True},
    ]
    identities = [af.plan(read(tmp_path, way)).identity for way in ways]
    assert len({identity.parameters for identity in identities}) == len(ways)
    assert len({(identity.model, identity.phases, identity.data, identity.optimizers) for identity in identities}) == 1
    assert af.plan(read(tmp_path)).identity == identities[0]
