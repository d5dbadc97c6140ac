"""O2: every trainable parameter in exactly one optimizer group, each group of one role."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.optim import OptimizerGroup, OptimizerLayout

OWNED = {"actor": ("embed", "layers.0.w", "norm"), "critic": ("head",)}


def layout(*groups: tuple[str, str, tuple[str, ...]]) -> OptimizerLayout:
    return OptimizerLayout(groups=tuple(OptimizerGroup(role=r, name=n, paths=p) for r, n, p in groups))


def test_O2_a_partition_passes() -> None:
    layout(
        ("actor", "matrix", ("layers.0.w",)), ("actor", "rest", ("norm", "embed")), ("critic", "rest", ("head",))
    ).check(OWNED)


def test_O2_a_parameter_in_two_groups_is_refused() -> None:
    with pytest.raises(RecordError, match=r"actor\.norm is in optimizer groups 'a' and 'b'; one may own it"):
        layout(
            ("actor", "a", ("embed", "norm")), ("actor", "b", ("norm", "layers.0.w")), ("critic", "c", ("head",))
        ).check(OWNED)


def test_O2_a_parameter_in_no_group_is_refused() -> None:
    with pytest.raises(RecordError, match=r"actor\.layers\.0\.w is in no optimizer group \(2 such parameters\)"):
        layout(("actor", "a", ("embed",)), ("critic", "c", ("head",))).check(OWNED)


def test_O2_a_group_of_what_is_no_parameter_is_refused() -> None:
    with pytest.raises(RecordError, match=r"optimizer group 'c' names critic\.bias, which is not a parameter"):
        layout(("actor", "a", OWNED["actor"]), ("critic", "c", ("head", "bias"))).check(OWNED)


def test_O2_a_group_of_a_role_that_is_not_trained_is_refused() -> None:
    with pytest.raises(
        RecordError,
        match="optimizer group 'j' owns judge.w, but role 'judge' is not trainable; trainable roles are actor, critic",
    ):
        layout(("judge", "j", ("w",))).check(OWNED)


def test_O2_a_group_is_declared_once() -> None:
    with pytest.raises(RecordError, match="optimizer group 'a' of role 'actor' is declared twice"):
        layout(("actor", "a", ("embed",)), ("actor", "a", ("norm", "layers.0.w")), ("critic", "a", ("head",))).check(
            OWNED
        )


@given(
    paths=st.lists(st.text("abc.", min_size=1, max_size=5), min_size=1, max_size=8, unique=True),
    data=st.data(),
)
def test_O2_exactly_the_partitions_are_accepted(paths: list[str], data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.lists(st.sampled_from([*paths, "foreign"])), min_size=1, max_size=4))
    claimed = [path for group in groups for path in group]
    made = layout(*((("actor", str(number), tuple(group))) for number, group in enumerate(groups)))
    if sorted(claimed) == sorted(paths):
        made.check({"actor": tuple(paths)})
    else:
        with pytest.raises(RecordError):
            made.check({"actor": tuple(paths)})


@given(paths=st.lists(st.text("abc.", min_size=1, max_size=5), min_size=1, max_size=8, unique=True), data=st.data())
def test_O2_any_labelling_makes_a_partition(paths: list[str], data: st.DataObject) -> None:
    labels = data.draw(st.lists(st.sampled_from("xyz"), min_size=len(paths), max_size=len(paths)))
    groups = [
        ("actor", name, tuple(p for p, label in zip(paths, labels, strict=True) if label == name)) for name in "xyz"
    ]
    layout(*groups).check({"actor": tuple(paths)})
