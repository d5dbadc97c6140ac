"""One run from its specification to its export: plan, prepare, train, sum up."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from areno_fn.ckpt.background import Writer
from areno_fn.ckpt.hf import Progress
from areno_fn.ckpt.resume import latest, save_state
from areno_fn.contracts.errors import DivergenceError, RewardError, SpecError
from areno_fn.contracts.identity import ACCEPTABLE, check_accepted
from areno_fn.contracts.record import donate
from areno_fn.contracts.spec import Phase, RunSpec
from areno_fn.contracts.state import TrainState
from areno_fn.engine import summary
from areno_fn.engine.composition import snapshots_of
from areno_fn.engine.export import ADAPTER, AVERAGED, export, exports_average
from areno_fn.engine.finetune import LoraPlan, count
from areno_fn.engine.foreseen import foreseen
from areno_fn.engine.identity import read_elsewhere
from areno_fn.engine.loop import train
from areno_fn.engine.medium import Medium
from areno_fn.engine.optimizers import Mover, described, long_warmups
from areno_fn.engine.outputs import Outputs, held, inspect, prepare
from areno_fn.engine.place import at
from areno_fn.engine.plan import Plan, plan
from areno_fn.engine.read_paths import require_apart
from areno_fn.engine.recorder import open_recorder
from areno_fn.engine.rewards import ModelJudge, models_of
from areno_fn.engine.specfile import read, write
from areno_fn.engine.specfile.files import require_spec
from areno_fn.engine.start import initial_state, require_same_run, resumed_state
from areno_fn.steps.advantages import Compare
from areno_fn.steps.recipes import Losses
from areno_fn.world.display import Display, open_display
from areno_fn.world.rewards import Reward, rehearse

STOPPED = 130
_STDERR = 2


def run(
    spec: RunSpec,
    *,
    resume: bool = False,
    overwrite: bool = False,
    losses: Mapping[str, Losses] | None = None,
    optimizers: Mapping[str, Mover | Mapping[str, Mover]] | None = None,
    advantages: Mapping[str, Compare] | None = None,
    accept: Sequence[str] = (),
) -> int:
    """Carries out a specification.

    Args:
        spec: what to do.
        resume: continue the run in its output folder; a folder without a checkpoint starts afresh.
        overwrite: delete a run in the output folder first.
        losses: by phase name, a loss of your own, as for `areno_fn.engine.plan.plan`.
        optimizers: by phase name, a `Transform` or a pair `(init, update)` of your own, or such by role, as for the same.
        advantages: by phase name, a function `(rewards [B], groups [B]) -> advantages [B]` of your own, as for the same.
        accept: in what a continued run may differ from the one that was started, by fields of its identity; what each
            means is in `areno_fn.contracts.identity.ACCEPTABLE`.

    Returns:
        0 when the run is complete, 130 when it was interrupted and left a checkpoint.
    """
    require_spec(spec)
    _check_accept(accept, resume)
    outputs = inspect(spec.out, resume=resume, overwrite=overwrite)
    require_apart(spec, overwrite=overwrite)
    _continued(outputs, resume)
    made = plan(spec, losses, optimizers, advantages)
    with prepare(spec.out, resume=resume, overwrite=overwrite) as outputs, closing(open_display()) as display:
        for phase in made.phases:
            for line in (*phase.remarks(), *made.medium.cut(phase.rows)):
                display.message(f"phases.{phase.spec.name}: {line}")
        for line in made.medium.cut(made.evaluation.rows) if made.evaluation is not None else ():
            display.message(f"evaluation: {line}")
        state = _train(made, outputs, display, resume, accept)
        if state.cursor.phase < len(made.phases):
            display.message(f"stopped after step {state.cursor.total}; {_how_to_go_on(made, outputs)}")
            return STOPPED
        _finish(made, outputs, state, display)
        return 0


def describe(spec: RunSpec, *, resume: bool = False, overwrite: bool = False, accept: Sequence[str] = ()) -> str:
    """What a run would do, after every check that `run` makes before it reads a weight. Writes nothing.

    Every reward is asked once, by `areno_fn.world.rewards.rehearse`.
    """
    _check_accept(accept, resume)
    made = plan(spec)
    # after everything else: a folder that holds a run must not hide what is wrong with the specification
    outputs = inspect(spec.out, resume=resume, overwrite=overwrite, occupied=True)
    require_apart(spec, overwrite=overwrite)
    checkpoint, unread = _continued(outputs, resume), list[str]()
    if checkpoint is not None:
        recorded = _recorded(outputs)
        unread = _unread(spec, recorded, require_same_run(made, checkpoint, recorded, accept))
    lines = [f"{spec.name}: {made.model.family.name} on {made.device}, seed {spec.seed}, out {spec.out}"]
    if not resume and not overwrite and (there := held(outputs)) is not None:
        lines.append(f"  to run it: {there}")
    lines += [f"  {line}" for line in unread]
    beside = "" if made.critic is None else f", and a critic of {count(made.critic.shapes()):,}"
    lines.append(f"  trained: {made.finetune.describe()}{beside}{made.cast.describe()}")
    if made.model.pipeline is not None:
        lines.append(f"  {made.model.pipeline.describe()}")
    for phase in made.phases:
        kind = phase.spec.algorithm
        contract = kind.execution
        lines.append(
            f"  {phase.spec.name}: {kind.__struct_config__.tag} ({contract.acquisition} + {contract.feedback}), "
            f"{phase.steps} steps of {phase.spec.batch.rows} rows from {phase.size}"
        )
        lines += [f"    {line}" for line in (*phase.remarks(), *made.medium.cut(phase.rows))]
        lines += [f"    {line}" for line in made.medium.remarks(phase.rows, trained=bool(phase.examples))]
        lines += [f"    {line}" for line in described(phase.spec, made.trained)]
        lines += [f"    {line}" for line in long_warmups(phase.spec, phase.steps)]
        taken = foreseen(made, phase.spec)
        lines += [] if taken is None else [f"    a step takes, on a GPU, at most {taken}"]
        if phase.graphs is not None:
            lines.append(f"    updates are captured: at most {phase.graphs.most} sizes at a time, in one memory")
        lines += [f"    keeps {name}{_place(phase.spec, name)}" for name in snapshots_of(phase.spec)]
        lines += _rehearsed(f"phases.{phase.spec.name}.rewards", phase.rewards, phase.rows, made.medium)
    if made.evaluation is not None:
        lines.append(f"  evaluation: {len(made.evaluation.rows)} rows")
        lines += [f"    {line}" for line in made.medium.cut(made.evaluation.rows)]
        lines += [f"    {line}" for line in made.medium.remarks(made.evaluation.rows, trained=False)]
        lines += _rehearsed("evaluation.rewards", made.evaluation.rewards, made.evaluation.rows, made.medium)
    return "\n".join(lines)


def _place(phase: Phase, name: str) -> str:
    return ", on the host" if name in phase.offload else ""


def _rehearsed(where: str, rewards: Sequence[Reward], rows: Sequence[Mapping[str, Any]], medium: Medium) -> list[str]:
    """What rewards say of the first rows of every data set; a function that cannot judge is found before any training."""
    with at(where):
        said = rehearse(rewards, rows, medium.rehearsed, medium.tries)
    first, second = medium.tried
    lines = [f"    {name}: {nothing:g} for {first}, {right:g} for {second}" for name, (nothing, right) in said.items()]
    judges = [(reward.name, reward.function) for reward in rewards]
    return lines + [f"    {name}: {judge.describe()}" for name, judge in judges if isinstance(judge, ModelJudge)]


def _train(made: Plan, outputs: Outputs, display: Display, resume: bool, accept: Sequence[str]) -> TrainState:
    checkpoint = latest(outputs.checkpoints) if resume else None
    if checkpoint is None:
        if resume:
            display.message(f"no checkpoint in {outputs.checkpoints}: this run starts at its beginning")
        state = initial_state(made, _progress(display, "weights"))
    else:
        state = _resumed(made, outputs, display, checkpoint, accept)
    for model in models_of(made.rewards):
        model.load(_progress(display, f"reward model {model.folder.path.name}"))
    _record(made.spec, outputs)
    # it writes while rewards are asked, which may change the current folder for as long as they are at it
    writer = Writer(outputs.checkpoints.absolute(), made.identity, roles=made.roles, keep=made.spec.checkpoint.keep)

    def store(state: TrainState) -> None:
        writer.save(state.cursor.total, state)

    resumed = None if checkpoint is None else state.cursor
    recorder = open_recorder(made, outputs, display, store, resumed, writer.reserve)
    try:
        # the writer is inside, so that what interrupts the wait for its last write is still listened to
        with _asked_to_stop() as stop, writer:
            try:
                return train(made, donate(state), recorder, stop)
            except KeyboardInterrupt:
                if writer.is_writing:
                    display.message("waiting until the last checkpoint is whole; interrupt once more to give it up")
                raise
    except (DivergenceError, RewardError):
        if latest(outputs.checkpoints) is not None:
            display.message(f"stopped by an error; when it is mended, {_how_to_go_on(made, outputs)}")
        raise
    finally:
        recorder.close()


def _resumed(made: Plan, outputs: Outputs, display: Display, checkpoint: Path, accept: Sequence[str]) -> TrainState:
    recorded = _recorded(outputs)
    accepted = require_same_run(made, checkpoint, recorded, accept)
    state = resumed_state(made, checkpoint, recorded, accepted)
    display.message(f"continuing after step {state.cursor.total} from {checkpoint}")
    for line in _unread(made.spec, recorded, accepted):
        display.message(line)
    for field in accepted:
        display.message(f"accepted another value of {field}: {ACCEPTABLE[field]}")
    if accepted:
        # under its new identity at once: what was accepted need not be accepted again, and agrees with spec.yaml
        keep = made.spec.checkpoint.keep
        save_state(outputs.checkpoints, state.cursor.total, state, made.identity, keep, roles=made.roles)
    return state


def _unread(spec: RunSpec, recorded: RunSpec | None, accepted: Sequence[str]) -> list[str]:
    """That what roles begin with was read when the run began, where another folder is named now."""
    if recorded is None or "phases" in accepted:
        return []
    kept = "the parameters that the run began with go on, which are in its states"
    return [f"{change}; {kept}" for change in read_elsewhere(recorded, spec)]


def _continued(outputs: Outputs, resume: bool) -> Path | None:
    """The state to continue; none where a run begins, which then must not take the place of what another has left."""
    checkpoint = latest(outputs.checkpoints) if resume else None
    if resume and checkpoint is None and outputs.results:
        raise SpecError(
            f"out: {outputs.results[0]} is there, but no checkpoint that a run could be continued from; move it elsewhere, choose "
            f"another folder, or pass --overwrite to delete it"
        )
    return checkpoint


def _check_accept(accept: Sequence[str], resume: bool) -> None:
    if check_accepted(accept) and not resume:
        raise SpecError(
            "accept: it says in what a continued run may differ from the one that was started; use it with resume alone"
        )


def _record(spec: RunSpec, outputs: Outputs) -> None:
    """Writes the resolved specification; it appears whole, because a continued run is compared with it."""
    beside = outputs.spec.with_name("spec.partial.yaml")
    write(spec, beside)
    beside.replace(outputs.spec)


def _recorded(outputs: Outputs) -> RunSpec | None:
    """The specification of the run in the folder; None where it is gone, and digests alone must tell runs apart."""
    try:
        return read(outputs.spec)
    except SpecError:
        return None


def _how_to_go_on(made: Plan, outputs: Outputs) -> str:
    if made.own:
        given = ", ".join(f"{name}=..." for name in made.own)
        return f"continue with the call that started it and resume=True: af.train(spec, {given}, resume=True)"
    return f"continue with: python -m areno_fn.run {shlex.quote(str(outputs.spec))} --resume"


def _finish(made: Plan, outputs: Outputs, state: TrainState, display: Display) -> None:
    export(made, state, outputs.export)
    from areno_fn.world import curves  # matplotlib, which only the end of a run needs

    curves.draw(outputs.metrics, outputs.curves)
    judges = () if made.evaluation is None else made.evaluation.rewards
    rewards = tuple(reward.name for reward in judges if reward.weight)
    found = summary.write(made.spec, outputs.metrics, outputs.summary, rewards)
    for phase in found["phases"]:
        display.message(_summed_up(phase))
    adapter = {"its adapter": ADAPTER} if isinstance(made.finetune, LoraPlan) else {}
    average = {"its average": outputs.export.name + AVERAGED} if exports_average(made) else {}
    beside = adapter | average | {f"the {role}": role for role in made.spec.export.roles}
    others = "".join(f", {what} in {outputs.export.with_name(name)}" for what, name in beside.items())
    display.message(f"trained model in {outputs.export}{others}, curves in {outputs.curves}")
    for left in outputs.left_over(made.spec):
        display.message(
            f"{left} was there before; this specification does not write it, so it is not of the trained model"
        )


def _summed_up(phase: Mapping[str, Any]) -> str:
    text = f"{phase['name']}: {phase['steps']} steps in {phase['seconds']:.0f} s"
    before, after, rewards = phase["eval_start"], phase["eval_end"], phase["eval_rewards"]
    if before is None or after is None:
        return text
    what = rewards[0] if len(rewards) == 1 else f"the sum of {', '.join(rewards)}"
    return f"{text} and evaluations in {phase['eval_seconds']:.0f} s, {what} {before:.3f} -> {after:.3f}"


def _progress(display: Display, what: str) -> Progress:
    shows: list[Callable[[int, int], None]] = []  # nothing is shown where nothing is loaded

    def progress(done: int, total: int, done_bytes: int, total_bytes: int) -> None:
        del done_bytes, total_bytes
        if not shows:
            shows.append(display.loading(what))
        shows[0](done, total)

    return progress


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Within it, the first Ctrl-C (or SIGTERM) is remembered and a second one interrupts.

    Only the main thread can listen to signals; a run in another one is not asked.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if asked:
            signal.default_int_handler(number, frame)
        asked.append(number)
        # not through a buffered stream, which the signal may have interrupted
        os.write(_STDERR, b"stopping after this step; interrupt once more to stop at once\n")

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
