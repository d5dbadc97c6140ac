"""`RunIdentity` and `digest`: what may change and what may not when a run goes on."""

from __future__ import annotations

import hashlib
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typeguard import suppress_type_checks

from areno_fn.contracts.errors import CheckpointError, SpecError
from areno_fn.contracts.identity import ACCEPTABLE, NEVER, RunIdentity, check_accepted, digest
from areno_fn.contracts.spec import (
    GRPO,
    SFT,
    AdamWSpec,
    ArithmeticData,
    Batch,
    FunctionReward,
    Phase,
    Sampling,
    Schedule,
)

PHASE = Phase(
    name="grpo",
    algorithm=GRPO(sampling=Sampling(max_tokens=8)),
    data=[ArithmeticData()],
    steps=10,
    rewards=[FunctionReward(function="a:b")],
)
IDENTITY = RunIdentity(family="qwen3", model="m", phases="p", data="d", parameters="q", optimizers="o", seed=1)

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def reordered(value: object) -> object:
    if isinstance(value, dict):
        return {key: reordered(inner) for key, inner in reversed(value.items())}
    return [reordered(inner) for inner in value] if isinstance(value, list) else value


@given(values)
def test_S1_the_order_of_keys_does_not_matter(value: object) -> None:
    assert digest(value) == digest(reordered(value))


@given(values, values)
def test_S1_equal_digests_mean_equal_values(first: object, second: object) -> None:
    assert (digest(first) == digest(second)) == (repr(reordered_by_key(first)) == repr(reordered_by_key(second)))


def reordered_by_key(value: object) -> object:
    if isinstance(value, dict):
        return {key: reordered_by_key(value[key]) for key in sorted(value)}
    return [reordered_by_key(inner) for inner in value] if isinstance(value, list) else value


def test_S1_values_that_look_alike_have_their_own_digests() -> None:
    alike = [0, 0.0, -0.0, False, None, "", [], {}, float("nan"), float("inf"), float("-inf"), "nan", "0", [0], [[0]]]
    assert len({digest(value) for value in alike}) == len(alike)


def test_S1_the_order_of_a_list_matters() -> None:
    assert digest([1, 2]) != digest([2, 1])


def changed(struct: msgspec.Struct, **fields: object) -> msgspec.Struct:
    return msgspec.structs.replace(struct, **fields)


def test_S1_any_field_of_a_phase_changes_its_digest() -> None:
    """Each row changes one setting of the phase, at any depth."""
    grpo = PHASE.algorithm
    variants = [
        PHASE,
        changed(PHASE, name="other"),
        changed(PHASE, algorithm=SFT()),
        changed(PHASE, algorithm=changed(grpo, clip_low=0.3)),
        changed(PHASE, algorithm=changed(grpo, clip_high=0.3)),
        changed(PHASE, algorithm=changed(grpo, samples=4)),
        changed(PHASE, algorithm=changed(grpo, sampling=Sampling(max_tokens=9))),
        changed(PHASE, algorithm=changed(grpo, sampling=Sampling(max_tokens=8, temperature=0.9))),
        changed(PHASE, data=[ArithmeticData(seed=1)]),
        changed(PHASE, data=[ArithmeticData(), ArithmeticData()]),
        changed(PHASE, steps=11),
        changed(PHASE, batch=Batch(rows=8)),
        changed(PHASE, optimizers=[AdamWSpec(lr=2e-6)]),
        changed(PHASE, optimizers=[AdamWSpec(schedule=Schedule(kind="cosine"))]),
        changed(PHASE, optimizers=[AdamWSpec(max_grad_norm=0.5)]),
        changed(PHASE, rewards=[FunctionReward(function="a:c")]),
        changed(PHASE, rewards=[FunctionReward(function="a:b", weight=2.0)]),
    ]
    assert len({digest(variant) for variant in variants}) == len(variants)


def test_a_digest_is_frozen() -> None:
    """Checkpoints written earlier carry it: SHA-256 of the MessagePack of the value with sorted keys."""
    packed = bytes.fromhex("82 a161 a178 a162 93 01 cb4004000000000000 c0")
    assert digest({"b": [1, 2.5, None], "a": "x"}) == hashlib.sha256(packed).hexdigest()[:16] == "ec92c4034bf062d9"


def test_an_identity_equals_itself() -> None:
    assert IDENTITY.differences(IDENTITY) == {}
    IDENTITY.require(attrs.evolve(IDENTITY), "out/run")


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(RunIdentity)])
def test_S1_a_difference_in_any_field_is_refused_by_name(name: str) -> None:
    other = attrs.evolve(IDENTITY, **{name: 2 if name == "seed" else "other"})
    assert IDENTITY.differences(other) == {name: (getattr(IDENTITY, name), getattr(other, name))}
    with pytest.raises(CheckpointError) as caught:
        IDENTITY.require(other, "out/run")
    assert str(caught.value) == (
        f"out/run belongs to another run: {name} was {getattr(other, name)} and is now {getattr(IDENTITY, name)}; "
        "resume with the specification it was started with"
        + (f", or pass --accept {name}" if name in ACCEPTABLE else "")
    )


def test_all_differences_are_named_at_once() -> None:
    other = attrs.evolve(IDENTITY, data="e", seed=2)
    with pytest.raises(CheckpointError, match="data was e and is now d; seed was 2 and is now 1"):
        IDENTITY.require(other, "out/run")


def test_every_field_either_can_be_accepted_or_says_why_not() -> None:
    assert sorted([*ACCEPTABLE, *NEVER]) == sorted(field.name for field in attrs.fields(RunIdentity))
    assert all(ACCEPTABLE.values()) and all(NEVER.values())


def test_what_is_accepted_may_differ_and_nothing_else() -> None:
    other = attrs.evolve(IDENTITY, data="e", seed=2)
    IDENTITY.require(other, "out/run", ("seed", "data"))
    with pytest.raises(CheckpointError) as caught:
        IDENTITY.require(other, "out/run", ("data", "phases"))
    assert str(caught.value) == (
        "out/run belongs to another run: seed was 2 and is now 1; "
        "resume with the specification it was started with, or pass --accept seed"
    )


def test_flags_are_offered_only_where_they_would_help() -> None:
    with pytest.raises(CheckpointError) as caught:
        IDENTITY.require(attrs.evolve(IDENTITY, data="e", model="n"), "out/run")
    assert str(caught.value).endswith("; resume with the specification it was started with")
    with pytest.raises(CheckpointError) as caught:
        IDENTITY.require(attrs.evolve(IDENTITY, data="e", seed=2), "out/run")
    assert str(caught.value).endswith("with, or pass --accept data --accept seed")


@pytest.mark.parametrize("given", ["phases", 3, None])
def test_what_is_accepted_comes_in_a_list(given: Any) -> None:
    with (
        suppress_type_checks(),
        pytest.raises(SpecError, match="accept: it is a list of fields, as in .'phases'., received"),
    ):
        check_accepted(given)


@pytest.mark.parametrize("name", [*NEVER, "daat"])
def test_what_cannot_be_accepted_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_accepted(["data", name])
    reason = NEVER.get(name, "an identity has no such field")
    assert str(caught.value) == (
        f"accept: {name!r} cannot be accepted, {reason}; what can be is phases, data, optimizers, seed"
    )
