"""Algorithms that sample, on a toy policy and a toy critic, with everything that an update was given on record."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from toy_policy import Attention

from areno_fn import tree
from areno_fn.contracts.actions import Actions, Sums
from areno_fn.contracts.batch import JudgedRollout, Prompts
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import GSPO, PPO, AdamWSpec, Sampled
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.contracts.valued import Valued
from areno_fn.steps import recipes
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.optimizers.adamw import adamw
from areno_fn.steps.recipes import ACTOR, CRITIC, Algorithm, Materials
from areno_fn.steps.reduce import measure

POLICY = Attention()


@attrs.frozen
class Update:
    """What one call of the loss was given, as data, and what it measured."""

    old: torch.Tensor
    advantage: torch.Tensor
    reference: torch.Tensor | None
    rollout: torch.Tensor | None
    measured: dict[str, float]


def begun(
    spec: Sampled,
    loss: Any = None,
    *,
    rate: float = 1e-3,
    micro_tokens: int = 1000,
    build: Any = recipes.build,
    donate: bool = False,
) -> tuple[Algorithm, TrainState]:
    """An algorithm, and a state whose actor has moved since the phase began."""
    optimizer = adamw(AdamWSpec(lr=rate, max_grad_norm=0.0), 100)
    roles = (ACTOR, CRITIC) if isinstance(spec, PPO) else (ACTOR,)
    materials = Materials(
        policy=POLICY, optimizers=dict.fromkeys(roles, optimizer), stop=(0,), micro_tokens=micro_tokens, donate=donate
    )
    algorithm = build(spec, materials, loss)
    params = POLICY.init()
    own: dict[str, Any] = {ACTOR: params}
    if CRITIC in roles:
        own[CRITIC] = Valued(trunk=POLICY.init(seed=1), head=torch.full((1, POLICY.width), 0.1))
    state = TrainState(params=own, optim={}, snapshots={}, counters=Counters(), key=Key.of(3), cursor=Cursor())
    state = algorithm.begin(state)
    return algorithm, replace(state, params={**own, ACTOR: tree.map(lambda x: x * 1.3, params)})


def judged(algorithm: Algorithm, state: TrainState) -> JudgedRollout:
    """Completions of three prompts, and a reward for each."""
    assert algorithm.sample is not None
    tokens = torch.tensor([[3, 4, 5], [6, 7, 1], [2, 9, 1]])
    rollout = algorithm.sample(state, Prompts(tokens=tokens, lengths=torch.tensor([3, 2, 2]), ids=torch.arange(3)))
    return JudgedRollout(rollout=rollout, rewards=(rollout.tokens % 5).sum(1).float())


def updates(
    spec: Sampled, *, rate: float = 1e-3, build: Any = recipes.build
) -> tuple[list[Update], JudgedRollout, TrainState]:
    """Every update that one step of an algorithm makes, the rollout and the state before."""
    seen: list[Update] = []
    options = {"low": spec.clip_low, "high": spec.clip_high, "importance_cap": spec.importance_cap}
    own = sequence_clipped(**options) if isinstance(spec, GSPO) else clipped(**options)

    def noting(actions: Actions) -> Sums:
        sums = own(actions)
        measured = {name: float(value.detach()) for name, value in measure(sums).items()}
        seen.append(Update(actions.old, actions.advantage, actions.reference, actions.rollout, measured))
        return sums

    algorithm, state = begun(spec, noting, rate=rate, build=build)
    batch = judged(algorithm, state)
    algorithm.step(state, batch)
    return seen, batch, state
