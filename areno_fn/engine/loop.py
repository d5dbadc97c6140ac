"""The only training loop. Steps are pure; everything with an effect happens here, between them.

The loop reads where it stands from `TrainState.cursor`, so continuing a run is calling it with a loaded state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from areno_fn import tree
from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.batch import JudgedRollout
from areno_fn.contracts.execution import CycleUnit
from areno_fn.contracts.record import replace
from areno_fn.contracts.state import Cursor, TrainState
from areno_fn.engine.evaluate import EvaluationResult, evaluate, pad_prompts
from areno_fn.engine.phases import PhasePlan
from areno_fn.engine.plan import Plan
from areno_fn.engine.recorder import Recorder
from areno_fn.engine.text import completions
from areno_fn.steps.recipes import ACTOR
from areno_fn.steps.token.pack import micro_batches
from areno_fn.world.clock import Stopwatch
from areno_fn.world.order import batch_rows, next_position
from areno_fn.world.rewards import score


def train(plan: Plan, state: TrainState, recorder: Recorder, stop: Callable[[], bool] = lambda: False) -> TrainState:
    """Runs the phases that are left.

    Args:
        plan: what `areno_fn.engine.plan.plan` returned.
        state: a fresh state or one loaded from a checkpoint.
        recorder: receives metrics, samples and checkpoints.
        stop: asked after every step; True ends the run there, with a checkpoint.

    Returns:
        The last state; its cursor stands behind the last phase when the run is complete.
    """
    latest: EvaluationResult | None = None
    while state.cursor.phase < len(plan.phases):
        phase = plan.phases[state.cursor.phase]
        recorder.begun(state)
        if state.cursor.step == 0:
            state = phase.algorithm.begin(state)
            latest = latest or _evaluate(plan, state)
            recorder.evaluated(state, latest)
        state, latest = _run_phase(plan, phase, state, recorder, stop)
        if state.cursor.step < phase.steps and not _reached(phase, latest):
            return state
        state = replace(state, cursor=Cursor(phase=state.cursor.phase + 1, total=state.cursor.total))
        recorder.save(state)
        if stop():
            return state
    return state


def _run_phase(
    plan: Plan, phase: PhasePlan, state: TrainState, recorder: Recorder, stop: Callable[[], bool]
) -> tuple[TrainState, EvaluationResult | None]:
    """Steps until the phase is done or a stop was asked for; returns the evaluation of its end, if it got there."""
    take = _dataset_step if phase.prompts is None else _generation_step
    every = plan.evaluation.every if plan.evaluation else 0
    while True:
        watch = Stopwatch()
        state, metrics = take(plan, phase, state, recorder)
        recorder.stepped(state, metrics | {"time/step": watch.seconds()})
        done = state.cursor.step == phase.steps
        if done or (every and state.cursor.step % every == 0):
            result = _evaluate(plan, state)
            recorder.evaluated(state, result)
            if done or _reached(phase, result):
                return state, result
        stopping = stop()
        if stopping or recorder.due(state):
            recorder.save(state)
        if stopping:
            return state, None


def _reached(phase: PhasePlan, result: EvaluationResult | None) -> bool:
    """Whether an evaluation ends the phase early."""
    goal = phase.spec.stop_at
    return goal is not None and result is not None and result.score >= goal


def _dataset_step(plan: Plan, phase: PhasePlan, state: TrainState, recorder: Recorder) -> tuple[TrainState, Metrics]:
    del recorder
    examples = [phase.examples[row] for row in _rows(phase, state)]
    batch = micro_batches(examples, phase.spec.batch.micro_tokens)
    state, metrics = phase.algorithm.step(state, tree.map(lambda x: x.to(plan.device), batch))
    return _advance(phase, state, count_epochs=True), metrics


def _generation_step(plan: Plan, phase: PhasePlan, state: TrainState, recorder: Recorder) -> tuple[TrainState, Metrics]:
    sample, prompts = phase.algorithm.sample, phase.prompts
    assert sample is not None and prompts is not None, "the phase was planned for an algorithm that generates"
    rows = _rows(phase, state)
    watch = Stopwatch()
    rollout = sample(state, pad_prompts(prompts, rows, plan.device))
    texts = completions(rollout, plan.tokenizer)
    seconds = {"time/rollout": watch.lap()}
    samples = len(texts) // len(rows)
    owners = [phase.rows[row] for row in rows for _ in range(samples)]
    totals, parts = score(phase.rewards, owners, texts)
    seconds["time/reward"] = watch.lap()
    judged = JudgedRollout(rollout=rollout, rewards=torch.tensor(totals, dtype=torch.float32, device=plan.device))
    state, metrics = phase.algorithm.step(state, judged)
    seconds["time/train"] = watch.lap()
    state = _advance(phase, state, count_epochs=False)
    recorder.completions(state, owners, texts, totals)
    rates = {"rollout/tokens_per_s": float(rollout.lengths.sum()) / max(seconds["time/rollout"], 1e-9)}
    means = {f"reward/{name}": sum(values) / len(values) for name, values in parts.items()}
    return state, metrics | means | rates | seconds


def _rows(phase: PhasePlan, state: TrainState) -> list[int]:
    """The rows of the next batch: a function of the run's key, the phase and the cursor."""
    key = state.key.fold("order").fold(state.cursor.phase)
    return batch_rows(key, state.cursor.epoch, state.cursor.batch, phase.size, phase.spec.batch.rows)


def _advance(phase: PhasePlan, state: TrainState, *, count_epochs: bool) -> TrainState:
    cursor = state.cursor
    epoch, batch = next_position(cursor.epoch, cursor.batch, phase.size, phase.spec.batch.rows)
    counters = state.counters
    if count_epochs and epoch > cursor.epoch:
        counters = counters.advance_cycle(CycleUnit.DATA_EPOCH)
    moved = replace(cursor, step=cursor.step + 1, epoch=epoch, batch=batch, total=cursor.total + 1)
    return replace(state, counters=counters, cursor=moved)


def _evaluate(plan: Plan, state: TrainState) -> EvaluationResult | None:
    if plan.evaluation is None:
        return None
    key = state.key.fold("evaluation")
    return evaluate(plan.evaluation, plan.rollout, state.params[ACTOR], plan.tokenizer, key, plan.device)
