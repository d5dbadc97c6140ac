"""`RoleLayout`: names, at least one trainable role, and no shared storage between trainable ones (S3)."""

from __future__ import annotations

import pytest
import torch

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.roles import Role, RoleLayout

TWO = RoleLayout(roles=(Role(name="actor"), Role(name="critic", exported=False), Role(name="judge", trainable=False)))


def test_the_trainable_roles_in_order() -> None:
    assert TWO.trainable == ("actor", "critic")


def test_a_name_is_used_once() -> None:
    with pytest.raises(RecordError, match="role 'actor' is declared twice"):
        RoleLayout(roles=(Role(name="actor"), Role(name="actor", trainable=False)))


@pytest.mark.parametrize("roles", [(), (Role(name="actor", trainable=False),)])
def test_something_must_be_trained(roles: tuple[Role, ...]) -> None:
    with pytest.raises(RecordError, match="a run needs at least one trainable role"):
        RoleLayout(roles=roles)


def params() -> dict[str, dict[str, torch.Tensor]]:
    return {name: {"w": torch.ones(2, 2), "b": torch.zeros(2)} for name in ("actor", "critic", "judge")}


def test_a_state_with_the_declared_roles_passes() -> None:
    TWO.check(params())


def test_a_state_with_other_roles_is_refused() -> None:
    missing = {name: value for name, value in params().items() if name != "judge"}
    with pytest.raises(
        RecordError,
        match=r"the state has roles \['actor', 'critic'\], but the plan declares \['actor', 'critic', 'judge'\]",
    ):
        TWO.check(missing)


@pytest.mark.parametrize("share", [lambda w: w, lambda w: w.t(), lambda w: w[1:], lambda w: w.detach()])
def test_S3_trainable_roles_that_share_storage_are_refused(share: object) -> None:
    state = params()
    state["critic"]["w"] = share(state["actor"]["w"])  # type: ignore[operator]
    with pytest.raises(
        RecordError, match="trainable roles 'actor' and 'critic' share a tensor's storage; copy one of them"
    ):
        TWO.check(state)


def test_S3_an_update_of_one_role_leaves_the_other_bit_for_bit() -> None:
    start = {"w": torch.ones(2, 2)}
    state = {"actor": start, "critic": tree.map(torch.clone, start), "judge": start}
    TWO.check(state)
    before = tree.map(torch.clone, state["actor"])
    _, slope = value_and_grad(lambda p: (p["w"] ** 2).sum())(state["critic"])
    moved = {**state, "critic": tree.map(lambda p, g: p - g, state["critic"], slope)}
    assert tree.equal(moved["actor"], before) and not tree.equal(moved["critic"], before)


def test_a_frozen_role_may_be_the_start_of_a_trainable_one() -> None:
    state = params()
    state["judge"] = state["actor"]
    TWO.check(state)


def test_a_tied_weight_within_one_role_is_allowed() -> None:
    state = params()
    state["actor"]["b"] = state["actor"]["w"]
    TWO.check(state)


def test_empty_and_meta_tensors_share_nothing() -> None:
    state = params()
    for name in state:
        state[name]["b"] = torch.empty(0)
        state[name]["w"] = torch.empty(2, 2, device="meta")
    TWO.check(state)
    state["critic"]["w"] = state["actor"]["w"]
    with pytest.raises(RecordError, match="share a tensor's storage"):
        TWO.check(state)
