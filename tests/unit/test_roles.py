"""`RoleLayout`: names, trunks, and memory in which the update of one role would show in another (S3)."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import torch

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.memory import Place, overlaps, place
from areno_fn.contracts.roles import Role, RoleLayout

View = Callable[[torch.Tensor], torch.Tensor]

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
    with pytest.raises(RecordError, match=r"^actor\.w and critic\.w share storage; copy one of them$"):
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


def test_a_tied_weight_is_one_leaf_of_a_trainable_role() -> None:
    """Two paths to one tensor would become two tensors with the first update."""
    state = params()
    state["judge"]["b"] = state["judge"]["w"]
    TWO.check(state)
    state["actor"]["b"] = state["actor"]["w"]
    with pytest.raises(
        RecordError, match=r"actor\.w and actor\.b are one tensor, .* keep a tied parameter as one leaf"
    ):
        TWO.check(state)


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (lambda m: m[:, 0], lambda m: m[:, 1], False),
        (lambda m: m[:2], lambda m: m[2:], False),
        (lambda m: m[:, :2], lambda m: m[:, 2:], False),
        (lambda m: m[::2], lambda m: m[1], False),
        (lambda m: m.t(), lambda m: m[3, 3:], True),
        (lambda m: m[:, 1:3], lambda m: m[:, 2:], True),
        (lambda m: m.view(torch.uint8)[0, 5:6], lambda m: m[0, 1:2], True),
        (lambda m: m.view(torch.uint8)[0, 5:6], lambda m: m[0, 2:3], False),
        (lambda m: m[::3], lambda m: m[:, ::3], True),
    ],
)
def test_leaves_of_one_role_may_be_parts_of_one_buffer_that_share_no_byte(
    first: View, second: View, shared: bool
) -> None:
    matrix = torch.zeros(4, 4)
    one = {"actor": {"a": first(matrix), "b": second(matrix)}}
    if shared:
        with pytest.raises(RecordError, match=r"actor\.a and actor\.b share storage; copy one of them"):
            RoleLayout(roles=(Role(name="actor"),)).check(one)
    else:
        RoleLayout(roles=(Role(name="actor"),)).check(one)


def test_a_leaf_that_is_moved_shares_no_byte_with_one_that_is_expanded() -> None:
    matrix, given = torch.zeros(4, 4), params()
    given["judge"]["w"] = matrix[0].expand(3, 4)
    given["actor"]["w"] = matrix[1]
    TWO.check(given)
    given["actor"]["w"] = matrix[0, 3:]
    with pytest.raises(RecordError, match=r"actor\.w and judge\.w share storage; copy one of them"):
        TWO.check(given)


def test_an_optimizer_may_hold_any_view_of_what_it_moves() -> None:
    state = params()
    moments = {"actor": {"slow": state["actor"]["w"].flatten()[1:]}}
    TWO.check(state, optim=moments)
    with pytest.raises(RecordError, match=r"actor\.w and optim\.actor\.slow share storage, and role 'actor' is moved"):
        TWO.check(state, optim=moments, in_place=("actor",))


def test_of_several_mistakes_the_first_by_path_is_named() -> None:
    state = params()
    shared = torch.ones(4)
    state["critic"] = {"z": shared, "y": shared[1:], "b": torch.ones(2), "a": shared[2:]}
    with pytest.raises(RecordError, match=r"^critic\.y and critic\.a share storage"):
        TWO.check(state)


def test_only_a_trainable_role_is_moved_in_place() -> None:
    with pytest.raises(RecordError, match="role 'judge' cannot be moved in place; trainable roles are actor, critic"):
        TWO.check(params(), in_place=("judge",))


def test_a_role_stands_on_no_role_that_is_trained_missing_or_itself() -> None:
    for trunk, what in (("actor", "which is trainable"), ("bsae", "which is no role; roles are actor, base")):
        with pytest.raises(RecordError, match=f"role 'actor' stands on the trunk '{trunk}', {what}"):
            RoleLayout(roles=(Role(name="actor", trunk=trunk), Role(name="base", trainable=False)))


def test_frozen_roles_share_a_declared_trunk_and_nothing_else() -> None:
    trunk = {"w": torch.ones(2)}
    state = {"actor": {"w": torch.ones(2)}, "base": trunk, "reward": {"trunk": trunk, "head": torch.ones(1)}}
    actor, base = Role(name="actor", trunk="base"), Role(name="base", trainable=False)
    RoleLayout(roles=(actor, base, Role(name="reward", trainable=False, trunk="base"))).check(state)
    third = Role(name="judge", trainable=False, trunk="base")
    both = (actor, base, Role(name="reward", trainable=False, trunk="base"), third)
    RoleLayout(roles=both).check({**state, "judge": {"own": torch.ones(1), "trunk": trunk}})
    with pytest.raises(RecordError, match=r"base\.w and reward\.trunk\.w share storage, and neither role is declared"):
        RoleLayout(roles=(actor, base, Role(name="reward", trainable=False))).check(state)


def test_many_leaves_are_compared_at_once() -> None:
    """In one sorted pass: two million pairs of 2,000 leaves, each compared, would be seen."""
    calls = []

    class Counted(Place):
        def same(self, other: Place) -> bool:
            calls.append(1)
            return Place.same(self, other)

    buffer = torch.zeros(4000)
    places = [place(str(n), ("params", "actor"), buffer[n : n + 1]) for n in range(2000)]
    counted = [Counted(**{a.name: getattr(p, a.name) for a in attrs.fields(Place)}) for p in places]
    assert not list(overlaps(counted)) and not calls


def test_empty_and_meta_tensors_share_nothing() -> None:
    state = params()
    for name in state:
        state[name]["b"] = torch.empty(0)
        state[name]["w"] = torch.empty(2, 2, device="meta")
    TWO.check(state)
    TWO.check({**state, "actor": {"w": torch.ones(3)}, "critic": {"w": torch.ones(3)[:0]}})
    buffer = torch.ones(3)
    TWO.check({**state, "actor": {"w": buffer}, "critic": {"w": buffer[:0]}})
    state["critic"]["w"] = state["actor"]["w"]
    with pytest.raises(RecordError, match=r"actor\.w and critic\.w share storage"):
        TWO.check(state)


@pytest.mark.parametrize("role", ["actor", "critic", "judge"])
def test_a_tensor_without_a_storage_is_named(role: str) -> None:
    given = params()
    given[role]["w"] = torch.eye(2).to_sparse()
    sentence = r"w is a tensor of layout sparse_coo, which has no storage of its own; keep it as a dense tensor"
    with pytest.raises(RecordError, match=rf"^{role}\.{sentence}"):
        TWO.check(given)
    with pytest.raises(RecordError, match=rf"^snapshots\.old\.{sentence}"):
        TWO.check(params(), snapshots={"old": given[role]})


OVERLAPPING: dict[str, View] = {
    "expand": lambda w: w[:1].expand(3, 2),
    "a scalar": lambda w: w[0, 0].expand(2),
    "as_strided": lambda w: w.flatten().as_strided((2, 2), (1, 1)),
    "unfold": lambda w: w.flatten().unfold(0, 3, 1),
}
APART: dict[str, View] = {
    "transposed": lambda w: w.t(),
    "every other": lambda w: w[:, ::2],
    "one row": lambda w: w[:1].expand(1, 2),
    "interleaved": lambda w: torch.ones(9).as_strided((3, 2), (2, 3)),
    "a number": lambda w: w[0, 0],
}


@pytest.mark.parametrize("view", OVERLAPPING)
def test_S3_elements_of_a_leaf_that_are_one_in_memory_are_refused_where_it_is_moved(view: str) -> None:
    given = params()
    given["actor"]["w"] = OVERLAPPING[view](given["actor"]["w"].clone())
    sentence = r"w is f32\[[\d,]+\], but some of its elements are one in memory, as after expand or as_strided"
    for in_place in ((), ("actor",)):
        with pytest.raises(RecordError, match=rf"^actor\.{sentence}"):
            TWO.check(given, in_place=in_place)
    frozen = {**params(), "judge": given["actor"]}
    moments = {"actor": {"w": given["actor"]["w"].clone(), "mu": given["actor"]["w"]}}
    TWO.check(frozen, optim=moments)
    with pytest.raises(RecordError, match=r"^optim\.actor\.mu is .* one in memory"):
        TWO.check(params(), optim=moments, in_place=("actor",))


@pytest.mark.parametrize("view", APART)
def test_elements_with_places_of_their_own_pass(view: str) -> None:
    given = params()
    given["actor"]["w"] = APART[view](given["actor"]["w"].clone())
    TWO.check(given, in_place=("actor",))


@pytest.mark.parametrize("part", ["params", "optim", "snapshots", "itself"])
def test_S3_moments_that_are_written_to_in_place_are_shared_with_nothing(part: str) -> None:
    moment = torch.zeros(2, 2)
    given, optim = params(), {"actor": {"mu": moment}, "critic": {"mu": torch.zeros(2, 2)}}
    snapshots = {"old": {"w": torch.ones(2, 2)}}
    if part == "params":
        given["critic"]["w"] = moment
    elif part == "optim":
        optim["critic"]["mu"] = moment
    elif part == "snapshots":
        snapshots["old"]["w"] = moment
    else:
        optim["actor"]["nu"] = moment
    TWO.check(given, optim=optim, snapshots=snapshots)
    with pytest.raises(RecordError, match=r"optim\.actor\.[mn]u .*share storage, and role 'actor' is moved in place"):
        TWO.check(given, optim=optim, snapshots=snapshots, in_place=("actor",))
