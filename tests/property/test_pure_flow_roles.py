"""An iteration of every algorithm of several roles is a function, moves its own roles alone, and a turn moves one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flow_recipe_toys import POLICY, STILL, drawn, start, taught, worth
from hypothesis import given, settings
from hypothesis import strategies as st

import areno_fn as af
from areno_fn import tree
from areno_fn.contracts.flow import Trajectory
from areno_fn.contracts.flow_batch import JudgedTrajectory
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.roles import Role, RoleLayout
from areno_fn.contracts.spec import (
    AdamWSpec,
    FewSteps,
    FlowDistill,
    FlowDMD2,
    FlowTaught,
    FlowTDM,
    FlowTDMR1,
    StudentDenoising,
)
from areno_fn.steps.optimizers import layout
from areno_fn.steps.recipes import FAKE, SURROGATE, TEACHER, Algorithm
from areno_fn.steps.recipes.flow_match import SLOW, SLOW_UPDATES
from areno_fn.testing import laws

SMALL: dict[str, Any] = {"samples": 2, "denoising": FewSteps(steps=2), "fake_updates": 2}
ALGORITHMS: dict[str, FlowTaught] = {
    "dmd2": FlowDMD2(**SMALL),
    "dmd2, a teacher's folder": FlowDMD2(**SMALL, teacher="folder", teacher_guidance=2.0),
    "tdm": FlowTDM(**SMALL, teacher_guidance=2.0),
    "tdm_r1": FlowTDMR1(**SMALL, teacher_guidance=2.0),
    "distill": FlowDistill(teacher_guidance=2.0, denoising=StudentDenoising(steps=2)),
    "distill, noisy": FlowDistill(
        teacher="folder", denoising=StudentDenoising(steps=3, dynamics="cps", level=0.5), space="gaussian"
    ),
}


def roles_of(spec: FlowTaught) -> RoleLayout:
    trained = (Role(name=name, exported=name == "actor") for name in spec.roles)
    taught = (Role(name=TEACHER, trainable=False, exported=False),) if spec.teacher else ()
    return RoleLayout(roles=(*trained, *taught))


def begun(spec: FlowTaught) -> tuple[Algorithm, af.TrainState]:
    teacher = (POLICY, tree.map(lambda x: 0.8 * x, start())) if spec.teacher else None
    return taught(spec, {role: af.adamw(AdamWSpec(role=role, lr=1e-2), 10) for role in spec.roles}, teacher)


def batch_of(spec: FlowTaught, algorithm: Algorithm, state: af.TrainState) -> Trajectory | JudgedTrajectory:
    batch = drawn(algorithm, state)
    return worth(batch) if isinstance(spec, FlowTDMR1) else batch


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_iteration_moves_its_roles_and_nothing_else(name: str) -> None:
    spec = ALGORITHMS[name]
    (algorithm, state), roles = begun(spec), roles_of(spec)
    groups = layout([AdamWSpec(role=role) for role in spec.roles], {role: state.params[role] for role in spec.roles})
    laws.roles_disjoint_exhaustive(roles, state.params, groups, state.optim)
    laws.no_alias(roles, state, in_place=spec.roles)
    rewarded = isinstance(spec, FlowTDMR1)
    after, _ = laws.step_is_pure(
        algorithm.step,
        state,
        batch_of(spec, algorithm, state),
        moves=spec.roles,
        renews=(SLOW,) if rewarded else (),
        sets=(SLOW_UPDATES,) if rewarded else (),
    )
    laws.no_alias(roles, after, in_place=spec.roles)


@settings(max_examples=8, deadline=None)
@given(role=st.sampled_from((FAKE, SURROGATE, "actor")), seed=st.integers(0, 2**32), rewards=st.permutations(range(6)))
def test_S3_a_turn_leaves_the_other_roles_bit_for_bit(role: str, seed: int, rewards: list[int]) -> None:
    """All other optimizers move nothing, so that what changes is what the turn of one role has changed."""
    spec = FlowTDMR1(**SMALL)
    movers = dict.fromkeys(spec.roles, STILL) | {role: af.adamw(AdamWSpec(role=role, lr=1e-2), 10)}
    algorithm, state = taught(spec, movers, key=Key.of(seed))
    # a fake and a surrogate that have learned something, so that every turn has something to move for
    params = state.params | {other: tree.map(lambda x: 0.9 * x, state.params[other]) for other in (FAKE, SURROGATE)}
    state = replace(state, params=params)
    judged = worth(drawn(algorithm, state), torch.tensor(rewards, dtype=torch.float32))
    after, _ = algorithm.step(state, judged)
    for name in spec.roles:
        assert tree.equal(after.params[name], state.params[name]) == (name != role)
    assert tree.equal(after.snapshots["reference"], state.snapshots["reference"])
    assert tree.equal(after.key, state.key) and tree.equal(after.cursor, state.cursor)
