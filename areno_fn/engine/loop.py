"""The only training loop. Steps are pure; everything with an effect happens here, between them.

The loop reads where it stands from `TrainState.cursor`, so continuing a run is calling it with a loaded state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.batch import PackedTokens
from areno_fn.contracts.errors import DivergenceError, RewardError
from areno_fn.contracts.execution import CycleUnit
from areno_fn.contracts.record import donate, replace
from areno_fn.contracts.state import Cursor, TrainState
from areno_fn.engine.evaluate import EvaluationPlan, EvaluationResult, evaluate
from areno_fn.engine.phases import PhasePlan
from areno_fn.engine.plan import Plan
from areno_fn.engine.recorder import Judged, Recorder
from areno_fn.engine.references import References
from areno_fn.engine.rewards import each_of
from areno_fn.engine.transfer import to_device
from areno_fn.steps.recipes import ACTOR, REFERENCE
from areno_fn.steps.token.pairs import pair_batches
from areno_fn.world.clock import Stopwatch
from areno_fn.world.order import batch_rows, next_position
from areno_fn.world.rewards import score


def train(plan: Plan, state: TrainState, recorder: Recorder, stop: Callable[[], bool] = lambda: False) -> TrainState:
    """Runs the phases that are left.

    Args:
        plan: what `areno_fn.engine.plan.plan` returned.
        state: a fresh state or one loaded from a checkpoint. Hand it over with `donate`, so that the parameters
            the run starts from do not stay in memory beside those it has.
        recorder: receives metrics, samples and checkpoints.
        stop: asked after every step; True ends the run there, with a checkpoint.

    Returns:
        The last state; its cursor stands behind the last phase when the run is complete.

    Raises:
        RewardError: a reward failed; what was done before it is in a checkpoint.
        DivergenceError: a loss or a gradient is not finite; the last checkpoint is from before it.
    """
    latest: EvaluationResult | None = None
    references: References | None = None
    if state.cursor.step and state.cursor.phase < len(plan.phases):
        recorder.begun(state)
    while state.cursor.phase < len(plan.phases):
        phase = plan.phases[state.cursor.phase]
        if references is None or not state.cursor.step:
            references = References(phase.pairs, phase.spec.batch.micro_tokens)
        if not state.cursor.step:
            state = phase.algorithm.begin(state)
            recorder.begun(state)
            latest = None if _drawn_otherwise(plan, state) else latest
            latest = _evaluate(plan, state) if latest is None else attrs.evolve(latest, seconds=0.0)
            recorder.evaluated(state, latest)
        if state.cursor.step < phase.steps:
            with _kept(state, recorder):
                state = _step(plan, phase, state, recorder, references)
        with _kept(state, recorder):
            latest, average = None, None
            if _evaluation_due(plan, phase, state):
                latest, average = _evaluate(plan, state), _evaluate_average(plan, phase, state)
        recorder.evaluated(state, latest, average)
        ended = state.cursor.step >= phase.steps or _reached(phase, latest)
        if ended:
            _let_graphs_go(phase)
            state = replace(state, cursor=_behind(plan, state.cursor))
        stopping = stop()
        if ended or stopping or recorder.due(state):
            recorder.save(state)
        if stopping:
            break
    _let_go(plan)
    return state


@contextmanager
def _kept(state: TrainState, recorder: Recorder) -> Iterator[None]:
    """Saves the state when a reward fails: a user's function must not cost the steps that were done before it."""
    try:
        yield
    except RewardError:
        if state.cursor.step:
            recorder.save(state)
        raise


def _drawn_otherwise(plan: Plan, state: TrainState) -> bool:
    """Whether the evaluations of a phase that begins draw in another way than those of the phase before."""
    place = state.cursor.phase
    return place > 0 and plan.phases[place].spec.denoising != plan.phases[place - 1].spec.denoising


def _evaluation_due(plan: Plan, phase: PhasePlan, state: TrainState) -> bool:
    every = plan.evaluation.every if plan.evaluation else 0
    return state.cursor.step >= phase.steps or (every > 0 and state.cursor.step % every == 0)


def _reached(phase: PhasePlan, result: EvaluationResult | None) -> bool:
    """Whether an evaluation ends the phase early."""
    goal = phase.spec.stop_at
    return goal > 0 and result is not None and result.score >= goal


def _behind(plan: Plan, cursor: Cursor) -> Cursor:
    """The place behind a phase. Behind the last one it keeps its data position, so that the phase can be prolonged."""
    following = cursor.phase + 1
    if following == len(plan.phases):
        return replace(cursor, phase=following)
    return Cursor(phase=following, total=cursor.total)


def _step(plan: Plan, phase: PhasePlan, state: TrainState, recorder: Recorder, references: References) -> TrainState:
    watch = Stopwatch()
    judged: Judged | None = None
    if phase.prompts is None:
        _let_go(plan)
    if phase.pairs:
        state, metrics = _preference_step(plan, phase, state, references)
    elif phase.prompts is None:
        state, metrics = _dataset_step(plan, phase, state)
    else:
        state, metrics, judged = _generation_step(plan, phase, state)
    recorder.stepped(state, metrics | {"time/step": watch.seconds()}, judged)
    _require_finite(phase, state, metrics)
    return state


def _require_finite(phase: PhasePlan, state: TrainState, metrics: Metrics) -> None:
    """A step in which a role diverged is not kept: everything after it would be NaN."""
    for name, value in metrics.items():
        family, _, what = name.rpartition("/")
        if what in ("loss", "grad_norm") and not math.isfinite(value):
            role = ACTOR if family == "train" else family
            raise DivergenceError(
                f"phases.{phase.spec.name}: {name} is {value} at step {state.cursor.step}, and nothing of that step is "
                f"kept; lower the learning rate of the {role}, or look for a number in its parameters, its data or a loss of "
                f"your own that is not finite"
            )


def _dataset_step(plan: Plan, phase: PhasePlan, state: TrainState) -> tuple[TrainState, Metrics]:
    batch = plan.medium.batch(phase.examples, _rows(phase, state), phase.spec)
    batch = to_device(batch, plan.device)
    state, metrics = phase.algorithm.step(donate(state), batch)
    return _advance(phase, state, count_epochs=True), metrics


def _preference_step(
    plan: Plan, phase: PhasePlan, state: TrainState, references: References
) -> tuple[TrainState, Metrics]:
    refer = phase.algorithm.refer
    assert refer is not None, "the phase was planned for an algorithm that compares pairs"

    def compute(packed: PackedTokens) -> torch.Tensor:
        return refer(state, to_device(packed, plan.device))

    rows = _rows(phase, state)
    watch = Stopwatch()
    known = references.of(rows, compute, state.snapshots[REFERENCE])
    phase.residency.release()
    seconds = {"time/score": watch.lap()}
    pairs = [phase.pairs[row] for row in rows]
    batch = pair_batches(pairs, known, phase.spec.batch.micro_tokens, few_sizes=phase.spec.capture)
    batch = to_device(batch, plan.device)
    state, metrics = phase.algorithm.step(donate(state), batch)
    return _advance(phase, state, count_epochs=True), metrics | seconds


def _generation_step(plan: Plan, phase: PhasePlan, state: TrainState) -> tuple[TrainState, Metrics, Judged | None]:
    sample, prompts = phase.algorithm.sample, phase.prompts
    assert sample is not None and prompts is not None, "the phase was planned for an algorithm that generates"
    rows = _rows(phase, state)
    watch = Stopwatch()
    rollout = sample(state, plan.medium.prompts(prompts, rows, plan.device))
    _let_go(plan)
    samples = plan.medium.shown(rollout)
    seconds = {"time/rollout": watch.lap()}
    if not phase.rewards:
        state, metrics = phase.algorithm.step(donate(state), rollout)
        seconds["time/train"] = watch.lap()
        rates = plan.medium.rates(rollout, seconds["time/rollout"])
        return _advance(phase, state, count_epochs=False), metrics | rates | seconds, None
    group = len(samples) // len(rows)
    owners = [phase.rows[row] for row in rows for _ in range(group)]
    totals, parts = score(phase.rewards, owners, samples, group, plan.medium.tokens(rollout))
    seconds["time/reward"] = watch.lap()
    summed = torch.tensor(totals, dtype=torch.float32, device=plan.device)
    batch = plan.medium.judged(rollout, summed, each_of(phase.rewards, owners, parts, plan.device))
    recalled = batch if phase.algorithm.recall is None else phase.algorithm.recall(state, batch)
    if recalled is not batch:
        seconds["time/score"] = watch.lap()
    # the first update takes the state over; rewards that cannot be compared leave it, and it is saved
    state, metrics = phase.algorithm.step(state, recalled)
    seconds["time/train"] = watch.lap()
    rates = plan.medium.rates(rollout, seconds["time/rollout"])
    means = {f"reward/{name}": sum(values) / len(values) for name, values in parts.items()}
    judged = Judged(rows=owners, samples=samples, totals=totals)
    return _advance(phase, state, count_epochs=False), metrics | means | rates | seconds, judged


def _let_graphs_go(phase: PhasePlan) -> None:
    """The memory of captured updates is not kept beside another phase."""
    if phase.graphs is not None:
        phase.graphs.clear()


def _let_go(plan: Plan) -> None:
    """What completions were drawn with is not kept beside a training step."""
    if plan.merged is not None:
        plan.merged.clear()


def _rows(phase: PhasePlan, state: TrainState) -> list[int]:
    """The rows of the next batch: a function of the run's key, the phase and the cursor."""
    key = state.key.fold("order").fold(state.cursor.phase)
    cursor, rows = state.cursor, phase.spec.batch.rows
    return batch_rows(key, cursor.epoch, cursor.batch, phase.size, rows, phase.mixed)


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
    return _evaluation(plan, plan.evaluation, plan.drawn_with(state.params), state)


def _evaluate_average(plan: Plan, phase: PhasePlan, state: TrainState) -> EvaluationResult | None:
    if plan.evaluation is None or phase.spec.ema is None or not phase.spec.ema.evaluate:
        return None
    return _evaluation(plan, plan.evaluation, plan.finetune.view(phase.averaged(state)), state)


def _evaluation(plan: Plan, evaluation: EvaluationPlan, seen: Any, state: TrainState) -> EvaluationResult:
    key, own = state.key.fold("evaluation"), plan.phases[state.cursor.phase].spec.denoising
    evaluation = evaluation if own is None else attrs.evolve(evaluation, sampling=own)
    return evaluate(evaluation, plan.medium, seen, key, plan.device)
