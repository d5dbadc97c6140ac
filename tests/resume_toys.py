"""A run with three roles and two optimizers, dropout, schedules and a data cursor, small enough to be run often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from areno_fn import random, tree
from areno_fn.contracts.actions import Sums
from areno_fn.contracts.execution import CycleUnit
from areno_fn.contracts.key import Key
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.record import record, replace
from areno_fn.contracts.roles import Role, RoleLayout
from areno_fn.contracts.spec import AdamWSpec, Schedule
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.steps.compose import train_step
from areno_fn.steps.optimizers import adamw, chain, clip_by_global_norm, scale_by_learning_rate, with_master
from areno_fn.steps.schedules import learning_rate
from areno_fn.testing.resume import Run
from areno_fn.world.order import batch_rows, next_position

STEPS = 20
ROWS, BATCH = 18, 2
WIDTH = 6
ROLES = RoleLayout(
    roles=(
        Role(name="actor"),
        Role(name="critic", exported=False),
        Role(name="teacher", trainable=False, exported=False),
    )
)
ACTOR_RATE = learning_rate(Schedule(kind="cosine", warmup_steps=3), 0.05, STEPS)
CRITIC_RATE = learning_rate(Schedule(kind="linear", min_lr=0.01), 0.1, STEPS)


@record
class Rows:
    """Rows of the data set, int64 [B], what is put in, [B, WIDTH], and which of it is kept, [B, WIDTH]."""

    rows: torch.Tensor
    inputs: torch.Tensor
    kept: torch.Tensor


def actor_optimizer() -> Optimizer:
    spec = AdamWSpec(lr=0.05, max_grad_norm=0.5, schedule=Schedule(kind="cosine", warmup_steps=3))
    return adamw(spec, STEPS)


def critic_optimizer() -> Optimizer:
    return with_master(chain(clip_by_global_norm(1.0), scale_by_learning_rate(CRITIC_RATE)))


def start(seed: int = 0, width: int = WIDTH) -> TrainState:
    """An actor in bfloat16, a critic, and a teacher that follows the actor; the reference is the actor itself."""
    key = Key.of(seed)
    lanes = torch.arange(width)
    actor = {"w": random.normal(key.fold("w"), lanes, dtype=torch.float32).bfloat16(), "b": torch.zeros(())}
    critic = {"v": random.normal(key.fold("v"), lanes)}
    return TrainState(
        params={"actor": actor, "critic": critic, "teacher": tree.map(torch.clone, actor)},
        optim={"actor": actor_optimizer().init(actor), "critic": critic_optimizer().init(critic)},
        snapshots={"reference": dict(actor)},
        counters=Counters(),
        key=key,
        cursor=Cursor(),
    )


def rows_of(state: TrainState) -> list[int]:
    at = state.cursor
    return batch_rows(state.key.fold("order"), at.epoch, at.batch, ROWS, BATCH)


def batch(state: TrainState) -> Rows:
    """The rows that the cursor names, and a dropout mask from the key and the clock."""
    rows = torch.tensor(rows_of(state))
    lanes = torch.arange(state.params["critic"]["v"].shape[0])
    draw = state.key.fold("dropout").fold(state.counters.optimizer_step)
    inputs = torch.sin(rows[:, None] * 1.7 + lanes * 0.3)
    return Rows(rows=rows, inputs=inputs, kept=(random.uniform(draw, rows[:, None], lanes) > 0.5).float())


def actor_loss(params: Any, batch: Rows) -> Sums:
    value = (batch.inputs * batch.kept * params["w"].float()).sum(-1) + params["b"]
    return _sums((value - torch.cos(batch.rows.float())) ** 2)


def critic_loss(params: Any, batch: Rows) -> Sums:
    return _sums(((batch.inputs * batch.kept * params["v"]).sum(-1) - 1.0) ** 2)


def _sums(errors: torch.Tensor) -> Sums:
    return Sums(total=errors.sum(), weight=torch.tensor(float(errors.numel())), stats={}, peaks={})


_ACTOR = train_step(actor_loss, actor_optimizer(), role="actor")
_CRITIC = train_step(critic_loss, critic_optimizer(), role="critic", prefix="critic")


def step(state: TrainState, batch: Rows) -> tuple[TrainState, Mapping[str, Any]]:
    """Moves the actor, the critic and, behind the actor, the teacher; then the cursor."""
    state, metrics = _ACTOR(state, [batch])
    state, others = _CRITIC(state, [batch])
    teacher = tree.map(lambda old, new: torch.lerp(old, new, 0.25), state.params["teacher"], state.params["actor"])
    return moved(replace(state, params={**state.params, "teacher": teacher})), {**metrics, **others}


def moved(state: TrainState) -> TrainState:
    """The state with its cursor at the next batch."""
    at, counters = state.cursor, state.counters
    epoch, number = next_position(at.epoch, at.batch, ROWS, BATCH)
    if epoch > at.epoch:
        counters = counters.advance_cycle(CycleUnit.DATA_EPOCH)
    cursor = replace(at, step=at.step + 1, epoch=epoch, batch=number, total=at.total + 1)
    return replace(state, counters=counters, cursor=cursor)


def run(steps: int = STEPS) -> Run:
    return Run(start=start, batch=batch, step=step, steps=steps, roles=ROLES)


def after(steps: int, state: TrainState | None = None) -> TrainState:
    """The state after so many steps."""
    state = start() if state is None else state
    for _ in range(steps):
        state, _ = step(state, batch(state))
    return state
