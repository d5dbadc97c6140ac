"""Optimizers in a specification and in a run: what is read, what is refused before weights are loaded, what belongs to a run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from e2e import tiny
from typeguard import TypeCheckError, suppress_type_checks

import areno_fn as af
from areno_fn import tree
from areno_fn.contracts.errors import ArenoError, SpecError
from areno_fn.contracts.spec import AdamWSpec, Lora, MuonSpec, Remainder, RunSpec
from areno_fn.engine import specfile
from areno_fn.engine.start import initial_state
from areno_fn.steps.optimizers import chain, momentum, scale_by_learning_rate

BASE = tomllib.loads(tiny.SPEC)


def table(*optimizers: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """The supervised phase of the tiny run with other optimizers."""
    phase = {**BASE["phases"][0], "optimizers": list(optimizers), "steps": steps}
    return {**BASE, "phases": [phase], "evaluation": None}


def written(path: Path, *optimizers: dict[str, Any]) -> Path:
    plain = {key: value for key, value in table(*optimizers).items() if value is not None}
    path.write_text(json.dumps(plain))
    return path


def spec(*optimizers: dict[str, Any], **changes: Any) -> RunSpec:
    return msgspec.convert(table(*optimizers, **changes), RunSpec)


MUON = {
    "kind": "muon",
    "lr": 0.01,
    "momentum": 0.9,
    "groups": [{"name": "mlp", "paths": ["*.gate_up", "*.down"], "lr": 0.005, "weight_decay": 0.1}],
    "adamw": {"lr": 0.002, "groups": [{"name": "ends", "paths": ["embed"], "lr": 0.001, "weight_decay": 0.0}]},
}


def test_every_kind_is_read_and_written_again(tmp_path: Path) -> None:
    for kind in ("adamw", "adamw8bit", "sgd", "muon"):
        read = specfile.read(written(tmp_path / "s.json", {"kind": kind, "lr": 0.5}))
        assert read.phases[0].optimizers[0].lr == 0.5
        for suffix in (".toml", ".yaml", ".json", ".msgpack"):
            specfile.write(read, tmp_path / f"again{suffix}")
            assert specfile.read(tmp_path / f"again{suffix}") == read
    read = specfile.read(written(tmp_path / "s.json", MUON))
    muon = read.phases[0].optimizers[0]
    assert isinstance(muon, MuonSpec) and muon.momentum == 0.9 and muon.groups[0].paths == ["*.gate_up", "*.down"]
    assert isinstance(muon.adamw, Remainder) and muon.adamw.groups[0].lr == 0.001
    (tmp_path / "c.toml").write_text(specfile.commented(read))
    assert specfile.read(tmp_path / "c.toml") == read


def test_a_specification_without_a_kind_still_means_adamw(tmp_path: Path) -> None:
    read = specfile.read(written(tmp_path / "old.json", {"lr": 0.001, "betas": [0.9, 0.95]}))
    assert read.phases[0].optimizers == [AdamWSpec(lr=0.001, betas=(0.9, 0.95))]
    changed = specfile.read(tmp_path / "old.json", ["phases.sft.optimizers.actor.lr=0.5"])
    assert changed.phases[0].optimizers == [AdamWSpec(lr=0.5, betas=(0.9, 0.95))]


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"kind": "muon", "beta": 0.9}, "phases.sft.optimizers.actor has no field 'beta'"),
        ({"kind": "sgd", "betas": [0.9, 0.9]}, "phases.sft.optimizers.actor has no field 'betas'"),
        (
            {"kind": "muon", "momentum": 1.0},
            "phases.sft.optimizers.actor.momentum must be a number of at least 0 and below 1",
        ),
        (
            {"kind": "adamw", "lr": "1e-6"},
            "phases.sft.optimizers.actor.lr must be a number above 0 and at most 1000, received the text '1e-6'",
        ),
        ({"kind": "muon", "adamw": {"momentum": 0.9}}, "phases.sft.optimizers.actor.adamw has no field 'momentum'"),
        ({"kind": "adamw", "groups": [{"name": "a", "paths": ["embed"], "lr": 1.0}]}, "lacks 'weight_decay'"),
        (
            {"kind": "adamw", "groups": [{"name": "a", "paths": [], "lr": 1.0, "weight_decay": 0.0}]},
            "a list of at least 1",
        ),
    ],
)
def test_O7_O11_what_a_specification_cannot_say(tmp_path: Path, optimizer: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        specfile.read(written(tmp_path / "s.json", optimizer))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def group(name: str, *paths: str, lr: float = 0.001) -> dict[str, Any]:
    return {"name": name, "paths": list(paths), "lr": lr, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (
            {"kind": "sgd", "momentum": 0.0, "nesterov": True},
            "phases.sft.optimizers.actor.nesterov: there is no momentum to look ahead along",
        ),
        (
            {"kind": "adamw", "groups": [group("a", "embed"), group("a", "norm")]},
            "phases.sft.optimizers.actor.groups: two groups are named 'a'; names must differ",
        ),
        (
            {"kind": "muon", "groups": [group("a", "*.qkv")], "adamw": {"groups": [group("a", "embed")]}},
            "phases.sft.optimizers.actor.groups: two groups are named 'a'; names must differ",
        ),
        (
            {"kind": "adamw", "groups": [group("muon", "embed")]},
            "phases.sft.optimizers.actor.groups: 'muon' is what an optimizer calls the parameters of no group",
        ),
        (
            {"kind": "adamw", "groups": [group("ends", "head")]},
            "phases.sft.optimizers: actor: the group 'ends' asks for 'head', which names no parameter; they are ",
        ),
        (
            {"kind": "adamw8bit", "groups": [group("a", "embed"), group("b", "*")]},
            "phases.sft.optimizers: parameter embed is in the groups 'a' and 'b'; one may own it",
        ),
        (
            {"kind": "muon", "groups": [group("norms", "*norm")]},
            "the group 'norms' gives layers.0.attn_norm to Muon, which moves hidden matrices alone; put the group under `adamw`",
        ),
        (
            {"kind": "muon", "schedule": {"kind": "linear", "min_lr": 0.01}},
            "phases.sft.optimizers: schedule 'linear' decays from lr=0.0003 to min_lr=0.01, which is larger; lower min_lr",
        ),
    ],
)
def test_what_cannot_be_carried_out_is_refused_before_weights(optimizer: dict[str, Any], said: str) -> None:
    with pytest.raises(ArenoError) as refused:
        af.plan(spec(optimizer))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_O5_O6_a_plan_gives_muon_the_hidden_matrices_and_knows_their_blocks() -> None:
    plan = af.plan(spec(MUON))
    state = plan.phases[0].algorithm.begin(initial_state(plan))
    inner = state.optim["actor"].inner[1].inner
    assert set(inner) == {"muon", "mlp", "adamw", "ends"}
    owned = {name: {path for path, _ in tree.leaves_with_path(inner[name][0].momentum)} for name in ("muon", "mlp")}
    assert owned["muon"] == {f"layers.{i}.{leaf}" for i in range(2) for leaf in ("qkv", "o")}
    assert owned["mlp"] == {f"layers.{i}.{leaf}" for i in range(2) for leaf in ("gate_up", "down")}
    assert [block.size for block in plan.finetune.placements["layers.0.qkv"].blocks] == [32, 16, 16]  # type: ignore[union-attr]


def test_identity_covers_the_kind_the_groups_and_a_transform_of_ones_own() -> None:
    base = af.plan(spec({"kind": "adamw", "lr": 0.001})).identity
    for other in (
        {"kind": "adamw8bit", "lr": 0.001},
        {"kind": "sgd", "lr": 0.001},
        {"kind": "adamw", "lr": 0.001, "decay": "all"},
    ):
        assert set(base.differences(af.plan(spec(other)).identity)) == {"optimizers"}
    one, two = ({**MUON, "adamw": {"groups": [group("ends", "embed", lr=lr)]}} for lr in (0.1, 0.2))
    assert set(af.plan(spec(one)).identity.differences(af.plan(spec(two)).identity)) == {"optimizers"}
    given = af.plan(spec({"kind": "adamw", "lr": 0.001}), optimizers={"sft": scale_by_learning_rate(0.1)})
    assert set(base.differences(given.identity)) == {"optimizers"}


def sign_descent(rate: float) -> tuple[Any, Any]:
    """A pair as optax writes them."""

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        del params
        return tree.map(lambda g: -rate * g.sign(), updates), {"count": state["count"] + 1}

    return (lambda params: {"count": torch.zeros((), dtype=torch.int64)}, update)


def test_a_pair_of_ones_own_takes_the_place_of_the_optimizers(tmp_path: Path) -> None:
    """Two steps of 0.01 by the sign leave every weight 0 or 0.02 away; the norm of the gradient is reported."""
    made = msgspec.structs.replace(spec({"kind": "adamw", "lr": 0.5}), out=str(tmp_path / "out"))
    assert af.train(made, optimizers={"sft": sign_descent(0.01)}) == 0
    assert all(line["train/grad_norm"] > 0 for line in tiny.lines(tmp_path / "out/metrics.jsonl"))
    stored = tiny.tensors(tmp_path / "out")
    assert stored["optim.actor.inner.1.count"].item() == 2
    moved = []
    for path, leaf in tree.leaves_with_path(initial_state(af.plan(made)).params):
        steps = ((stored[f"params.{path}"] - leaf) / 0.01).flatten()
        assert (steps - steps.round()).abs().max() < 1e-3 and steps.abs().max() < 2.5
        moved.append(steps.abs().max().item())
    assert max(moved) > 0.5


def test_a_transform_of_the_library_is_a_pair_too(tmp_path: Path) -> None:
    made = msgspec.structs.replace(spec({"kind": "adamw"}), out=str(tmp_path / "out"))
    own = chain(momentum(0.9), scale_by_learning_rate(0.1))
    assert af.train(made, optimizers={"sft": own}) == 0
    assert [line["train/lr"] for line in tiny.lines(tmp_path / "out/metrics.jsonl")] == [0.1, 0.1]


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(SpecError, match="optimizers: there is no phase 'sftt'; the phases are sft"):
        af.plan(spec({"kind": "adamw"}), optimizers={"sftt": sign_descent(0.1)})
    for what in ("optimizers", "losses"):
        sentence = f"^{what}: what replaces those of the phase sft is None; leave the phase out$"
        with suppress_type_checks(), pytest.raises(SpecError, match=sentence):
            af.plan(spec({"kind": "adamw"}), **{what: {"sft": None}})
    # typeguard, where a run of the tests has it, sees the wrong type first
    with pytest.raises(
        (SpecError, TypeCheckError), match=r"a pair \(init, update\) of functions, not tuple|not callable"
    ):
        af.plan(spec({"kind": "adamw"}), optimizers={"sft": (3, 4)})  # type: ignore[dict-item]


def test_O6_muon_moves_adapters_of_hidden_matrices_and_adamw_that_of_the_head() -> None:
    made = spec({"kind": "muon"})
    config = {**made.model.config, "tie_word_embeddings": False}  # type: ignore[union-attr]
    made = msgspec.structs.replace(
        made,
        model=msgspec.structs.replace(made.model, config=config),
        finetune=Lora(rank=2, targets=["q_proj", "lm_head"]),
    )
    plan = af.plan(made)
    inner = plan.phases[0].algorithm.begin(initial_state(plan)).optim["actor"].inner[1].inner
    assert {path for path, _ in tree.leaves_with_path(inner["adamw"][0].mu)} == {"lm_head.a", "lm_head.b"}
    assert len(tree.leaves(inner["muon"][0].momentum)) == 4
