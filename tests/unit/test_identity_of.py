"""S1: whatever decides what a step computes changes the identity, by its field; nothing else does."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from e2e import tiny

import areno_fn as af
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.spec import RunSpec
from areno_fn.engine.identity import require_same_run

BASE = msgspec.convert(tomllib.loads(tiny.SPEC), RunSpec)


def spec(**changes: Any) -> RunSpec:
    """The tiny specification with fields replaced; in names two underscores stand for a dot."""
    table = msgspec.to_builtins(BASE)
    for name, value in changes.items():
        *way, last = name.split("__")
        inner: Any = table
        for part in way:
            inner = inner[int(part)] if isinstance(inner, list) else inner[part]
        inner[last] = value
    return msgspec.convert(table, RunSpec)


def identity(made: RunSpec, **losses: Any) -> RunIdentity:
    return af.plan(made, losses=losses).identity


@pytest.fixture(scope="module")
def base() -> RunIdentity:
    return identity(BASE)


INCLUDED = [
    ({"seed": 1}, {"seed"}),
    ({"model__family": "qwen2"}, {"family", "model", "parameters"}),
    ({"model__config__intermediate_size": 48}, {"model", "parameters"}),
    ({"model__config__rope_theta": 5000.0}, {"model"}),
    ({"model__config__initializer_range": 0.5}, {"model"}),
    ({"phases__0__algorithm__aggregation": "seq_mean_token_mean"}, {"phases"}),
    ({"phases__0__batch__rows": 4}, {"phases"}),
    ({"phases__0__batch__micro_tokens": 16}, {"phases"}),
    ({"phases__0__steps": 5}, {"phases"}),
    ({"phases__0__stop_at": 0.5}, {"phases"}),
    ({"phases__0__name": "first"}, {"phases", "optimizers"}),
    ({"phases__0__data__0__seed": 1}, {"data"}),
    ({"phases__0__data__0__count": 39}, {"data"}),
    ({"phases__0__data__0__weight": 2.0}, {"data"}),
    ({"phases__0__optimizers__0__lr": 0.5}, {"optimizers"}),
    ({"phases__0__optimizers__0__max_grad_norm": 0.5}, {"optimizers"}),
    ({"phases__1__algorithm__kl_coef": 0.2}, {"phases"}),
    ({"phases__1__algorithm__samples": 8}, {"phases"}),
    ({"phases__1__algorithm__epochs": 2}, {"phases"}),
    ({"phases__1__algorithm__sampling": {"max_tokens": 4, "top_k": 3}}, {"phases"}),
    ({"phases__1__rewards": [{"kind": "function", "function": "areno_fn.world.rewards:exact_match"}]}, {"phases"}),
    ({"phases__1__stop_at": 0.5}, {"phases"}),
    ({"phases__1__optimizers__0__schedule": {"kind": "cosine"}}, {"phases", "optimizers"}),
]
EXCLUDED = [
    {"name": "another"},
    {"out": "elsewhere"},
    {"device": "auto"},
    {"tokenizer": {"kind": "byte"}},
    {"phases__1__steps": 9},
    {"evaluation": None},
    {"evaluation__every": 1},
    {"evaluation__limit": 2},
    {"checkpoint": {"every": 1, "keep": 9}},
    {"export": {"dtype": "bfloat16"}},
    {"log": {"samples": 0}},
]


@pytest.mark.parametrize(("changes", "fields"), INCLUDED, ids=lambda value: str(sorted(value))[:60])
def test_S1_what_counts_changes_its_field(changes: dict[str, Any], fields: set[str], base: RunIdentity) -> None:
    assert set(base.differences(identity(spec(**changes)))) == fields


@pytest.mark.parametrize("changes", EXCLUDED, ids=lambda value: str(sorted(value))[:60])
def test_S1_what_does_not_count_changes_nothing(changes: dict[str, Any], base: RunIdentity) -> None:
    assert identity(spec(**changes)) == base


def test_S1_the_order_of_keys_does_not_matter(base: RunIdentity) -> None:
    table = tomllib.loads(tiny.SPEC)
    table["model"]["config"] = dict(reversed(table["model"]["config"].items()))
    assert identity(msgspec.convert(dict(reversed(table.items())), RunSpec)) == base


def test_the_order_of_phases_matters(base: RunIdentity) -> None:
    table = tomllib.loads(tiny.SPEC)
    table["phases"].reverse()
    assert "phases" in base.differences(identity(msgspec.convert(table, RunSpec)))


def test_an_evaluation_counts_where_it_ends_a_phase() -> None:
    stopping = spec(phases__0__stop_at=0.5)
    changed = msgspec.structs.replace(
        stopping,
        evaluation=msgspec.structs.replace(stopping.evaluation, limit=3),  # type: ignore[type-var]
    )
    assert set(identity(stopping).differences(identity(changed))) == {"phases"}


def test_the_length_of_the_last_phase_counts_where_its_rate_decays_over_it() -> None:
    decaying = {"phases__1__optimizers__0__schedule": {"kind": "linear"}}
    longer = identity(spec(**decaying, phases__1__steps=9))
    assert set(identity(spec(**decaying)).differences(longer)) == {"phases"}
    fixed = {"phases__1__optimizers__0__schedule": {"kind": "linear", "decay_steps": 4}}
    assert identity(spec(**fixed)) == identity(spec(**fixed, phases__1__steps=9))


def test_a_loss_of_ones_own_counts_by_its_name(base: RunIdentity) -> None:
    def mine(actions: af.Actions) -> af.Sums:
        raise NotImplementedError

    assert set(base.differences(identity(BASE, grpo=mine))) == {"phases"}


def test_the_patience_with_a_reward_does_not_count(base: RunIdentity) -> None:
    waits = {"phases__1__rewards__0__timeout": 5.0, "evaluation__rewards__0__timeout": 5.0}
    assert identity(spec(**waits)) == base
    stopping = {"phases__0__stop_at": 0.5}
    assert identity(spec(**waits, **stopping)) == identity(spec(**stopping))


def test_which_data_sets_a_reward_judges_counts_and_where_one_ends() -> None:
    rewards = [
        {"kind": "function", "function": "areno_fn.world.rewards:exact_match", "data": ["a"]},
        {"kind": "function", "function": "areno_fn.world.rewards:contains_answer", "data": ["b"]},
    ]
    sums = {"kind": "arithmetic", "digits": 1, "count": 3, "name": "a"}
    found = {
        identity(spec(phases__1__rewards=rewards, phases__1__data=data)).data
        for data in (
            [sums, sums | {"name": "b"}],
            [sums | {"name": "b"}, sums],
            [sums | {"weight": 1.0}, sums | {"name": "b", "weight": 1.0}],
        )
    }
    assert len(found) == 3


def test_rows_count_by_their_content(tmp_path: Path) -> None:
    def of(name: str, text: str) -> RunIdentity:
        (tmp_path / name).write_text(text)
        return identity(spec(phases__1__data=[{"kind": "jsonl", "path": str(tmp_path / name)}]))

    one = of("a.jsonl", '{"prompt": "a", "answer": "1", "x": 2}\n')
    assert of("b.jsonl", '\n{"x": 2, "answer": "1", "prompt": "a"}\n') == one
    # the reward may read any field
    assert set(one.differences(of("a.jsonl", '{"prompt": "a", "answer": "1", "x": 3}\n'))) == {"data"}


def test_documents_that_meet_in_the_same_tokens_are_told_apart(tmp_path: Path) -> None:
    def of(*pairs: tuple[str, str]) -> RunIdentity:
        rows = "".join(f'{{"prompt": "{prompt}", "response": "{response}"}}\n' for prompt, response in pairs)
        (tmp_path / "rows.jsonl").write_text(rows)
        return identity(spec(phases__0__data=[{"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}]))

    found = [of(("ab", "c")), of(("a", "bc")), of(("ab", "c"), ("a", "bc")), of(("a", "bc"), ("ab", "c"))]
    assert len({one.data for one in found}) == 4


def refusal(saved: RunSpec | None, now: RunSpec) -> str:
    with pytest.raises(CheckpointError) as caught:
        require_same_run(identity(now), now, identity(saved or BASE), saved, "step-1")
    return str(caught.value)


def test_equal_runs_are_not_refused(base: RunIdentity) -> None:
    require_same_run(base, BASE, base, None, "step-1")


def test_a_refusal_names_the_fields_with_both_values() -> None:
    said = refusal(BASE, spec(seed=2, phases__0__batch__rows=4, out="elsewhere", phases__1__steps=7))
    assert said == (
        "step-1 belongs to another run: phases.sft.batch.rows was 8 and is now 4; seed was 0 and is now 2; "
        "resume with the specification it was started with, or pass --accept phases --accept seed"
    )


def test_what_is_accepted_is_not_named() -> None:
    now = spec(seed=2, phases__0__batch__rows=4)
    with pytest.raises(CheckpointError) as caught:
        require_same_run(identity(now), now, identity(BASE), BASE, "step-1", ("phases",))
    assert str(caught.value).startswith("step-1 belongs to another run: seed was 0 and is now 2; resume with")
    require_same_run(identity(now), now, identity(BASE), BASE, "step-1", ("phases", "seed", "data"))


def test_a_length_is_named_only_where_it_is_tied() -> None:
    cosine = {"phases__1__optimizers__0__schedule": {"kind": "cosine"}}
    assert "steps" not in refusal(BASE, spec(**cosine))
    assert "phases.grpo.steps was 4 and is now 5" in refusal(spec(**cosine), spec(**cosine, phases__1__steps=5))


def test_without_the_old_specification_the_sort_of_change_is_named() -> None:
    said = refusal(None, spec(seed=2, phases__0__data__0__count=3))
    assert said.startswith("step-1 belongs to another run: the rows of the data and the seed changed; resume with")


def test_long_values_are_cut() -> None:
    many = [{"kind": "function", "function": "areno_fn.world.rewards:exact_match", "name": f"r{i}"} for i in range(5)]
    said = refusal(BASE, spec(phases__1__rewards=many))
    assert len(said) < 300
    assert "phases.grpo.rewards was [" in said and "..." in said
