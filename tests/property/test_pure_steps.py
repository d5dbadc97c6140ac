"""A step of every algorithm is a function of its arguments and moves its own roles alone, references in one storage included."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from recipe_toys import POLICY, judged

from areno_fn import tree
from areno_fn.contracts.batch import Example, Pair, Pairs
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.roles import Role, RoleLayout
from areno_fn.contracts.spec import (
    DPO,
    GRPO,
    GSPO,
    PPO,
    SFT,
    AdamW8bitSpec,
    AdamWSpec,
    Critic,
    MuonSpec,
    OptimizerSpec,
    Remainder,
    Sampling,
    SGDSpec,
)
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.contracts.valued import Valued
from areno_fn.steps.optimizers import layout, optimizer
from areno_fn.steps.recipes import ACTOR, CRITIC, REFERENCE, Algorithm, Materials, build
from areno_fn.steps.recipes.ppo import ITERATIONS
from areno_fn.steps.token.pack import pack
from areno_fn.steps.token.pairs import pack_pairs
from areno_fn.testing import laws

ROLES = RoleLayout(
    roles=(Role(name=ACTOR), Role(name=CRITIC, exported=False), Role(name="judge", trainable=False, exported=False))
)
_DRAWN: dict[str, Any] = {"samples": 2, "sampling": Sampling(max_tokens=4), "minibatches": 2}
ALGORITHMS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "sft": (SFT(), (ACTOR,)),
    "dpo": (DPO(), (ACTOR,)),
    "grpo": (GRPO(**_DRAWN, kl_coef=0.1), (ACTOR,)),
    "gspo": (GSPO(**_DRAWN), (ACTOR,)),
    "ppo": (PPO(**_DRAWN, kl_coef=0.1), (ACTOR, CRITIC)),
    "ppo, the critic alone": (PPO(**_DRAWN, critic=Critic(warmup=1)), (CRITIC,)),
}
MOVERS: dict[str, OptimizerSpec] = {
    "adamw": AdamWSpec(lr=1e-2),
    "adamw8bit": AdamW8bitSpec(lr=1e-2),
    "sgd": SGDSpec(lr=1e-2, momentum=0.9),
    "muon": MuonSpec(lr=1e-2, adamw=Remainder(lr=1e-2)),
}


def begun(spec: Any, mover: OptimizerSpec) -> tuple[Algorithm, TrainState]:
    """A phase that begins: the reference, where there is one, is the actor's own tensors."""
    movers = {role: optimizer(mover, 10) for role in (ACTOR, CRITIC)}
    algorithm = build(spec, Materials(policy=POLICY, optimizers=movers, stop=(0,), micro_tokens=40), None)
    actor = POLICY.init()
    params = {
        ACTOR: actor,
        CRITIC: Valued(trunk=POLICY.init(1), head=torch.full((1, POLICY.width), 0.1)),
        "judge": actor,
    }
    state = TrainState(params=params, optim={}, snapshots={}, counters=Counters(), key=Key.of(3), cursor=Cursor())
    return algorithm, algorithm.begin(state)


def batch_of(algorithm: Algorithm, state: TrainState) -> Any:
    rows = [Example(tokens=(3 + n, 5, 7, 2 * n), trained=(False, True, n != 1, True), row=n) for n in range(4)]
    if algorithm.sample is not None:
        return judged(algorithm, state)
    if algorithm.refer is None:
        return (pack(rows[:3]), pack(rows[3:]))
    packed = pack_pairs([Pair(chosen=rows[0], rejected=rows[1]), Pair(chosen=rows[2], rejected=rows[3])])
    return (Pairs(packed=packed, reference=algorithm.refer(state, packed)),)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_moves_its_roles_and_nothing_else(name: str) -> None:
    spec, moves = ALGORITHMS[name]
    algorithm, state = begun(spec, MOVERS["adamw"])
    laws.no_alias(ROLES, state)
    sets = (ITERATIONS,) if CRITIC in moves else ()
    after, _ = laws.step_is_pure(algorithm.step, state, batch_of(algorithm, state), moves=moves, sets=sets)
    laws.no_alias(ROLES, after)
    # once the actor has moved, the reference is what it was, in memory of its own
    if REFERENCE in after.snapshots and ACTOR in moves:
        laws.no_alias(ROLES, replace(after, params={**after.params, "judge": {}}), in_place=(ACTOR,))


@pytest.mark.parametrize("name", MOVERS)
def test_every_optimizer_leaves_its_arguments_alone(name: str) -> None:
    mover = MOVERS[name]
    algorithm, state = begun(PPO(**_DRAWN), mover)
    groups = layout(
        [replace_role(mover, role) for role in ROLES.trainable], {r: state.params[r] for r in ROLES.trainable}
    )
    laws.roles_disjoint_exhaustive(ROLES, state.params, groups, state.optim)
    laws.step_is_pure(algorithm.step, state, batch_of(algorithm, state), moves=(ACTOR, CRITIC), sets=(ITERATIONS,))


def replace_role(spec: OptimizerSpec, role: str) -> OptimizerSpec:
    return msgspec.structs.replace(spec, role=role)


def test_a_critic_that_begins_as_the_actor_shares_nothing_with_it() -> None:
    _, state = begun(PPO(**_DRAWN), MOVERS["adamw"])
    begun_as_actor = {**state.params, CRITIC: Valued(trunk=state.params[ACTOR], head=torch.zeros(1, POLICY.width))}
    with pytest.raises(AssertionError, match=r"actor\.embed and critic\.trunk\.embed share storage; copy one of them"):
        laws.no_alias(ROLES, replace(state, params=begun_as_actor))
    copied = {**begun_as_actor, CRITIC: tree.map(torch.clone, begun_as_actor[CRITIC])}
    laws.no_alias(ROLES, replace(state, params=copied))
