"""Groups: who moves which parameter, with which rate and decay, and what is refused."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from areno_fn import tree
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.placement import Vocabulary, grouped
from areno_fn.contracts.spec import AdamW8bitSpec, AdamWSpec, Group, MuonSpec, OptimizerSpec, Remainder, SGDSpec
from areno_fn.steps.optimizers import (
    adamw,
    hidden,
    labels_of,
    layout,
    optimizer,
    partition,
    scale_by_adam,
    scale_by_learning_rate,
)
from areno_fn.steps.optimizers.groups import matches
from areno_fn.testing import laws


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PARAMS = {
    "embed": draw(6, 4),
    "layers": [{"qkv": draw(8, 4, seed=1), "qkv_bias": draw(8, seed=2), "norm": draw(4, seed=3)}],
    "norm": draw(4, seed=4),
    "head": draw(6, 4, seed=5),
}


def owners(spec: OptimizerSpec, placements: Any = None) -> dict[str, tuple[str, ...]]:
    return {group.name: group.paths for group in layout([spec], {"actor": PARAMS}, {"actor": placements or {}}).groups}


def test_a_partition_hands_each_parameter_to_its_transform() -> None:
    transform = partition(
        {"fast": scale_by_learning_rate(1.0), "slow": scale_by_learning_rate(0.25), "none": scale_by_adam()},
        lambda path, leaf: "fast" if path == "a" else "slow",
    )
    params = {"b": torch.tensor([4.0]), "a": torch.tensor([2.0])}
    state = transform.init(params)
    moves, state = transform.update(params, state, params)
    assert moves["a"].item() == -2.0 and moves["b"].item() == -1.0
    assert list(moves) == ["b", "a"] and list(state.inner) == ["fast", "slow"]
    assert state.report()["lr"].item() == 1.0
    with pytest.raises(RecordError, match="parameter b has the label 'x'; the transforms are fast"):
        partition({"fast": scale_by_adam()}, lambda path, leaf: "x").init({"b": torch.ones(1)})


@given(labels=st.lists(st.sampled_from("xyz"), min_size=6, max_size=6))
def test_any_labelling_equals_the_transforms_alone(labels: list[str]) -> None:
    named = dict(zip([path for path, _ in tree.leaves_with_path(PARAMS)], labels, strict=True))
    rates = {"x": 1.0, "y": 0.5, "z": 0.25}
    transform = partition({k: scale_by_learning_rate(r) for k, r in rates.items()}, lambda path, leaf: named[path])
    moves, _ = transform.update(PARAMS, transform.init(PARAMS), PARAMS)
    for (path, move), leaf in zip(tree.leaves_with_path(moves), tree.leaves(PARAMS), strict=True):
        assert torch.equal(move, -rates[named[path]] * leaf)


def test_O6_only_hidden_matrices_go_to_muon_and_every_leaf_has_one_owner() -> None:
    placements = {"layers.0.qkv": grouped(2, 1, 2), "embed": Vocabulary(0)}
    found = owners(MuonSpec(), placements)
    assert found == {
        "adamw": ("embed", "layers.0.qkv_bias", "layers.0.norm", "norm", "head"),
        "muon": ("layers.0.qkv",),
    }
    assert not hidden({"table": Vocabulary(0)})("table", torch.ones(2, 2)) and hidden()("table", torch.ones(2, 2))
    assert not hidden()("model.lm_head.a", torch.ones(2, 2)) and not hidden()("layers.0.conv", torch.ones(4, 2))


def test_O6_a_remainder_takes_hidden_matrices_that_its_groups_name() -> None:
    group = Group(name="attention", paths=["*.qkv"], lr=1e-3, weight_decay=0.0)
    found = owners(MuonSpec(adamw=Remainder(groups=[group])))
    assert found["attention"] == ("layers.0.qkv",) and "muon" not in found


def test_groups_have_their_own_rate_and_decay_on_all_of_them() -> None:
    """Torch's AdamW with three groups; the group's decay is on a norm too."""
    groups = [
        Group(name="ends", paths=["embed", "head"], lr=1e-3, weight_decay=0.3),
        Group(name="norms", paths=["norm", "*.norm"], lr=5e-3, weight_decay=0.2),
    ]
    spec = AdamWSpec(lr=1e-2, weight_decay=0.1, max_grad_norm=0.0, groups=groups)

    def make(named: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": [named["embed"], named["head"]], "lr": 1e-3, "weight_decay": 0.3},
                {"params": [named["norm"], named["layers.0.norm"]], "lr": 5e-3, "weight_decay": 0.2},
                {"params": [named["layers.0.qkv"]], "weight_decay": 0.1},
                {"params": [named["layers.0.qkv_bias"]], "weight_decay": 0.0},
            ],
            lr=1e-2,
        )

    laws.optimizer_matches(adamw(spec, 100), make, PARAMS)


@pytest.mark.parametrize(
    ("decay", "decayed"),
    [("matrices", {"embed", "layers.0.qkv", "head"}), ("hidden", {"layers.0.qkv"}), ("all", None)],
)
@pytest.mark.parametrize("kind", [AdamWSpec, AdamW8bitSpec, SGDSpec])
def test_the_rule_says_what_decays(kind: Any, decay: Any, decayed: set[str] | None) -> None:
    """With no gradient, what decays moves by lr weight_decay p."""
    made = optimizer(kind(lr=0.1, weight_decay=0.5, decay=decay), 10)
    moved, _, _ = made.apply(tree.map(torch.zeros_like, PARAMS), made.init(PARAMS), PARAMS)
    for (path, before), after in zip(tree.leaves_with_path(PARAMS), tree.leaves(moved), strict=True):
        factor = 0.95 if decayed is None or path in decayed else 1.0
        torch.testing.assert_close(after, factor * before, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            AdamWSpec(groups=[Group(name="ends", paths=["embde"], lr=1.0, weight_decay=0.0)]),
            "actor: the group 'ends' asks for 'embde', which names no parameter; they are embed, layers.0.qkv, ",
        ),
        (
            AdamWSpec(
                groups=[
                    Group(name="a", paths=["embed"], lr=1.0, weight_decay=0.0),
                    Group(name="b", paths=["e*"], lr=1.0, weight_decay=0.0),
                ]
            ),
            "parameter embed is in the groups 'a' and 'b'; one may own it",
        ),
        (
            MuonSpec(groups=[Group(name="all", paths=["*"], lr=1.0, weight_decay=0.0)]),
            "actor: the group 'all' gives embed to Muon, which moves hidden matrices alone; put the group under `adamw`",
        ),
    ],
)
def test_a_group_that_cannot_be_is_refused(spec: OptimizerSpec, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        layout([spec], {"actor": PARAMS})
    assert said in str(refused.value)


def test_an_optimizer_of_a_role_that_is_not_trained_is_refused() -> None:
    with pytest.raises(RecordError, match=r"actor\.embed is in no optimizer group \(6 such parameters\)"):
        layout([AdamWSpec(role="critic")], {"actor": PARAMS})


def test_the_label_of_two_groups_is_refused_where_no_layout_was_asked() -> None:
    groups = [Group(name=name, paths=["w"], lr=1.0, weight_decay=0.0) for name in ("a", "b")]
    with pytest.raises(SpecError, match="parameter w is in the groups 'a' and 'b'"):
        labels_of(SGDSpec(groups=groups))("w", torch.ones(1))


@given(path=st.text("ab.", max_size=8), pattern=st.text("ab.*", max_size=6))
def test_a_star_stands_for_anything(path: str, pattern: str) -> None:
    assert matches(path, pattern) == fnmatch.fnmatchcase(path, pattern)


@pytest.mark.traced
@pytest.mark.parametrize("kind", [AdamWSpec, AdamW8bitSpec, SGDSpec, MuonSpec])
def test_every_kind_compiles_as_one_graph_and_is_not_traced_again(kind: Any) -> None:
    groups = [Group(name="attention", paths=["layers.*.qkv"], lr=1e-3, weight_decay=0.1)]
    made = optimizer(kind(groups=groups), 100)
    counter = CompileCounter()
    apply = torch.compile(made.apply, fullgraph=True, backend=counter)
    params = expected = tree.map(lambda leaf: leaf.bfloat16(), PARAMS)
    state = expected_state = made.init(params)
    for step in range(3):
        gradient = tree.map(lambda leaf, step=step: leaf + step, expected)
        params, state, _ = apply(gradient, state, params)
        expected, expected_state, _ = made.apply(gradient, expected_state, expected)
    assert counter.frame_count == 1 and tree.equal((params, state), (expected, expected_state))


@pytest.mark.parametrize("kind", [AdamWSpec, AdamW8bitSpec, SGDSpec, MuonSpec])
def test_every_kind_starts_on_meta_tensors_and_keeps_the_shape_of_its_state(kind: Any) -> None:
    params = tree.map(lambda leaf: leaf.bfloat16(), PARAMS)
    made = optimizer(kind(), 10)
    state = made.init(params)
    blank = made.init(tree.map(lambda leaf: leaf.to("meta"), params))
    _, after, stats = laws.pure(made.apply, tree.map(torch.ones_like, params), state, params)

    def shapes(value: Any) -> list[Any]:
        return [(path, leaf.dtype, leaf.shape) for path, leaf in tree.leaves_with_path(value)]

    assert shapes(blank) == shapes(state) == shapes(after) and {"grad_norm", "lr"} == set(stats)
    assert all(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(state))
