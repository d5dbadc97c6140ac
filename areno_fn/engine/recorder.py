"""Everything a run leaves behind while it goes on: metrics, completions, checkpoints, and what a person sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.state import Cursor, TrainState
from areno_fn.engine.evaluate import EvaluationResult
from areno_fn.engine.outputs import Outputs
from areno_fn.engine.plan import Plan
from areno_fn.world.clock import Stopwatch
from areno_fn.world.display import Display
from areno_fn.world.gallery import Gallery
from areno_fn.world.jsonl_log import truncate
from areno_fn.world.samples import Sample, SampleLog
from areno_fn.world.trackers import JsonlTracker, TensorBoardTracker, Tracker, combine


@attrs.frozen(kw_only=True)
class Judged:
    """Samples and what they are worth: one row of the data, one text or picture and one reward each."""

    rows: Sequence[Mapping[str, Any]]
    samples: Sequence[Any]
    totals: Sequence[float]


@attrs.frozen(kw_only=True)
class Recorder:
    """Receives what the loop has to say. Make one with `open_recorder`.

    Attributes:
        plan: the run.
        display: shows it.
        tracker: keeps metrics.
        sample_log: keeps completions.
        store: writes a resumable checkpoint, or begins to; the state may be overwritten when it has returned.
        gallery: keeps sheets of pictures; None of a model that makes none.
        ready: told of the first state of a phase, like which those that `store` gets will be.
        held: seconds that `store` has held up the training since the last step.
    """

    plan: Plan
    display: Display
    tracker: Tracker
    sample_log: SampleLog
    store: Callable[[TrainState], None]
    ready: Callable[[TrainState], None] = lambda state: None
    gallery: Gallery | None = None
    held: list[float] = attrs.field(factory=list)

    def begun(self, state: TrainState) -> None:
        """A phase begins, or goes on after a resume."""
        phase = self.plan.phases[state.cursor.phase]
        self.display.phase(phase.spec.name, phase.steps, state.cursor.step)
        self.ready(state)

    def stepped(self, state: TrainState, metrics: Metrics, judged: Judged | None = None) -> None:
        """A step is done; of the completions that it was made from some are kept, at first and now and then."""
        if self.held:
            metrics = {**metrics, "time/checkpoint": sum(self.held)}
            self.held.clear()
        self.tracker.log(state.cursor.total, self._name(state), metrics)
        self.display.step(state.cursor.step, metrics)
        step, every = state.cursor.step, self.plan.spec.log.samples_every
        if judged is not None and (step == 1 or step % every == 0):
            self._keep(state, judged)

    def evaluated(
        self, state: TrainState, result: EvaluationResult | None, average: EvaluationResult | None = None
    ) -> None:
        """An evaluation is done, or there is none in this run; so is that of an average, where one is kept."""
        if result is None:
            return
        metrics = result.metrics() | ({} if average is None else average.metrics("eval_ema"))
        metrics["time/evaluation"] = result.seconds + (0.0 if average is None else average.seconds)
        self.tracker.log(state.cursor.total, self._name(state), metrics)
        self.display.evaluation(metrics)
        evaluation = self.plan.evaluation
        if evaluation is not None:
            self._keep(state, Judged(rows=evaluation.rows, samples=result.samples, totals=result.totals))
            for name, found in (("eval", result), ("eval_ema", average)):
                if self.gallery is not None and found is not None:
                    self.gallery.hang(state.cursor.total, name, evaluation.rows, found.samples)

    def due(self, state: TrainState) -> bool:
        """Whether the specification asks for a checkpoint here."""
        every = self.plan.spec.checkpoint.every
        return every > 0 and state.cursor.step % every == 0

    def save(self, state: TrainState) -> None:
        """Writes a resumable checkpoint; how long that held up the training is told with the next step."""
        watch = Stopwatch()
        self.store(state)
        self.held.append(watch.seconds())

    def close(self) -> None:
        """Finishes all writing."""
        self.tracker.close()
        self.sample_log.close()
        self.display.close()

    def _name(self, state: TrainState) -> str:
        return self.plan.phases[state.cursor.phase].spec.name

    def _keep(self, state: TrainState, judged: Judged) -> None:
        first, text = slice(self.plan.spec.log.samples), self.plan.medium.text
        kept = [
            Sample(prompt=_prompt_text(row), completion=text(sample), reward=total, answer=_answer(row))
            for row, sample, total in zip(judged.rows[first], judged.samples[first], judged.totals[first], strict=True)
        ]
        self.sample_log.log(state.cursor.total, self._name(state), kept)
        self.display.samples(kept)


def open_recorder(
    plan: Plan,
    outputs: Outputs,
    display: Display,
    store: Callable[[TrainState], None],
    resumed: Cursor | None,
    ready: Callable[[TrainState], None] = lambda state: None,
) -> Recorder:
    """Opens the logs; those of a resumed run first lose what will be written again.

    Args:
        store, ready: as for `Recorder`.
        resumed: where the run continues, None for a fresh run.
    """
    after = -1 if resumed is None else resumed.total
    names = [phase.spec.name for phase in plan.phases]
    # the evaluation before a phase's first step is made again when the run continues there
    done = names if resumed is None else names[: resumed.phase + (resumed.step > 0)]
    for path in (outputs.metrics, outputs.samples):
        truncate(path, after, done)
    board = TensorBoardTracker(outputs.tensorboard, after) if plan.spec.log.tensorboard else None
    trackers: list[Tracker] = [JsonlTracker(outputs.metrics)]
    if board is not None:
        trackers.append(board)
    gallery = (
        Gallery(outputs.pictures, None if board is None else board.picture) if plan.model.medium == "pictures" else None
    )
    return Recorder(
        plan=plan,
        display=display,
        tracker=combine(*trackers),
        sample_log=SampleLog(outputs.samples, "picture" if gallery is not None else "completion"),
        store=store,
        ready=ready,
        gallery=gallery,
    )


def _prompt_text(row: Mapping[str, Any]) -> str:
    prompt = row.get("prompt", row.get("question", row.get("instruction", "")))
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))


def _answer(row: Mapping[str, Any]) -> str | None:
    answer = row.get("answer")
    return None if answer is None else str(answer)
