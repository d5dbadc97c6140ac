"""The identity of a run: digests of all that decides what its next step computes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import msgspec

from areno_fn import tree
from areno_fn.contracts.batch import Example
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.identity import RunIdentity, digest, way_out
from areno_fn.contracts.optim import Transform
from areno_fn.contracts.spec import (
    EMA,
    PPO,
    ClipReward,
    Evaluation,
    FlowDistill,
    FlowTaught,
    FullFinetune,
    ModelReward,
    Phase,
    RewardSpec,
    RunSpec,
    folders_of,
)
from areno_fn.engine.cast import Cast
from areno_fn.engine.critic import CriticPlan
from areno_fn.engine.model import ModelPlan
from areno_fn.engine.optimizers import Mover
from areno_fn.engine.phases import PhasePlan
from areno_fn.engine.reward_models import clip_content
from areno_fn.engine.rewards import clips_of, models_of
from areno_fn.engine.told import told
from areno_fn.steps.advantages import Compare
from areno_fn.steps.joins import stage_name
from areno_fn.steps.recipes import Losses
from areno_fn.world.pictures import PairRow, PictureRow
from areno_fn.world.prompted import PromptedRow
from areno_fn.world.rewards import Reward

_UNSAID = {
    "family": "the model's family",
    "model": "the configuration of the model, or what the frozen parts of its pipeline hold",
    "phases": "a loss of one's own, the end tokens, what a reward model's folder holds, the critic, the teacher, or the release",
    "data": "the rows of the data",
    "parameters": "the shapes or dtypes of the parameters, or which are trained",
    "optimizers": "the optimizers, or one of one's own",
    "seed": "the seed",
}
"""What an identity's field stands for, where no field of the specification shows the change."""


def identity_of(
    spec: RunSpec,
    model: ModelPlan,
    phases: Sequence[PhasePlan],
    losses: Mapping[str, Losses],
    stop: Sequence[int] = (),
    movers: Mapping[str, Mover | Mapping[str, Mover]] | None = None,
    critic: CriticPlan | None = None,
    ending: Sequence[Reward] = (),
    cast: Cast | None = None,
    compares: Mapping[str, Compare] | None = None,
) -> RunIdentity:
    """What a saved state must agree with to continue this run.

    How long the last phase goes on, evaluation, logging and the cadence of checkpoints are left out: they do
    not change what a step computes. Data counts by its tokens and rows, not by its path.

    Args:
        losses: by phase name, a loss that replaces the algorithm's own.
        stop: tokens that end a completion.
        movers: by phase name, what replaces its optimizers.
        critic: the role that estimates values, where there is one.
        ending: rewards of the evaluation, where a score of it ends a phase.
        cast: the roles of flow models beside the actor.
        compares: by phase name, what says advantages in the place of its algorithm.
    """
    named = {name: _called(loss) for name, loss in losses.items()}
    contents = _contents([*(phase.rewards for phase in phases), ending])
    return RunIdentity(
        family=model.family.name,
        model=digest(model.identity),
        phases=digest(
            [
                _settings(spec, "phases", _tied(spec), full=False),
                named,
                list(stop),
                *contents,
                *_critic(critic),
                *_teachers(spec, cast),
                *([] if spec.consistency == "ordinary" else [spec.consistency]),
                *([{name: stage_name(one) for name, one in compares.items()}] if compares else []),
            ]
        ),
        data=digest([_data(phase) for phase in phases]),
        parameters=digest(
            [
                *_leaves(model.shapes()),
                *([] if spec.finetune == FullFinetune() else [told(spec.finetune, full=False)]),
            ]
        ),
        optimizers=digest(_optimizers(spec, movers or {})),
        seed=spec.seed,
    )


def require_same_run(
    now: RunIdentity,
    spec: RunSpec,
    saved: RunIdentity,
    saved_spec: RunSpec | None,
    where: str,
    accept: Sequence[str] = (),
) -> None:
    """Refuses to continue another run, naming the fields of the specification that differ.

    Args:
        now: identity of the run that wants to continue, and `spec`, what it was asked for.
        saved: identity of the checkpoint, and `saved_spec`, what its run was asked for, where that is still known.
        where: the checkpoint.
        accept: fields of the identity that may differ.

    Raises:
        CheckpointError: the identities differ in another field.
        SpecError: a field that cannot be accepted.
    """
    fields = now.refused(saved, accept)
    if not fields:
        return
    changed = [] if saved_spec is None else [c for field in fields for c in _changes(saved_spec, spec, field)]
    unsaid = " and ".join(_UNSAID[field] for field in fields)
    shown = "; ".join(dict.fromkeys(changed)) or f"{unsaid} changed"
    raise CheckpointError(f"{where} belongs to another run: {shown}; {way_out(fields)}")


def _settings(spec: RunSpec, field: str, tied: bool, *, full: bool) -> Any:
    """The part of a specification behind a field of the identity, in plain values.

    Args:
        tied: the length of the last phase counts.
        full: with what is at its default.
    """
    names = [phase.name for phase in spec.phases]
    parts: dict[str, Any] = {"seed": spec.seed}
    if field == "data":
        read = [{"data": phase.data, "batch": phase.batch} for phase in spec.phases]
        parts = {"tokenizer": spec.tokenizer, "phases": dict(zip(names, read, strict=True))}
    elif field == "phases":
        kept = [_phase(phase, tied or phase is not spec.phases[-1], full) for phase in spec.phases]
        judges = _judges(spec.evaluation, full) if any(phase.stop_at for phase in spec.phases) else None
        parts = {"phases": dict(zip(names, kept, strict=True)), "evaluation": judges, "the order of phases": names}
    elif field == "optimizers":
        parts = {"phases": {phase.name: {"optimizers": _by_role(phase, full)} for phase in spec.phases}}
    elif field in ("family", "model", "parameters"):
        parts = {"model": spec.model, "finetune": spec.finetune}
    return told(parts, full=full)


def _optimizers(spec: RunSpec, movers: Mapping[str, Mover | Mapping[str, Mover]]) -> Any:
    """The settings of the optimizers, and the name of every one that replaces them."""
    said = _settings(spec, "optimizers", _tied(spec), full=False)
    own = {name: _named(mover) for name, mover in movers.items()}
    return [said, own] if own else said


def _by_role(phase: Phase, full: bool) -> Any:
    """The optimizers of a phase; their order does not matter."""
    ordered = sorted(phase.optimizers, key=lambda optimizer: optimizer.role)
    return {optimizer.role: optimizer for optimizer in ordered} if full else ordered


def _called(loss: Losses) -> Any:
    return {role: stage_name(one) for role, one in loss.items()} if isinstance(loss, Mapping) else stage_name(loss)


def _named(mover: Mover | Mapping[str, Mover]) -> Any:
    if isinstance(mover, Mapping):
        return {role: _named(one) for role, one in mover.items()}
    return stage_name(mover.update if isinstance(mover, Transform) else mover[1])


def _phase(phase: Phase, long: bool, full: bool) -> dict[str, Any]:
    drawn = () if phase.stop_at else ("denoising",)
    length = () if long else ("steps", "epochs")
    aside = ("data", "optimizers", "offload", "remat", "rewards", "ema", *drawn, *length)
    judged = {"rewards": _rewards(phase.rewards, full)} if full or phase.rewards else {}
    kept = told(phase, full=full, aside=aside)
    if isinstance(phase.algorithm, PPO):  # what a run begins with is in its states
        kept["algorithm"].get("critic", {}).pop("path", None)
    if isinstance(phase.algorithm, FlowTaught):
        for named in (kept["algorithm"], *kept["algorithm"].get("teachers", [])):
            named |= {name: bool(named[name]) for name in ("teacher", "path") if name in named}
    return kept | judged | _average(phase.ema, full)


def _average(ema: EMA | None, full: bool) -> dict[str, Any]:
    """All but what is done with an average."""
    return {} if ema is None else {"ema": told(ema, full=full, aside=("evaluate", "export"))}


def _judges(evaluation: Evaluation | None, full: bool) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    return told(evaluation, full=full, aside=("rewards",)) | {"rewards": _rewards(evaluation.rewards, full)}


def _rewards(rewards: Sequence[RewardSpec], full: bool) -> list[dict[str, Any]]:
    """All but how long an answer is waited for: a run whose reward took too long goes on with more time.

    Of a model that judges, what its folder holds counts, wherever that lies; of an address nothing does.
    """
    aside = ("timeout", "concurrency", "path", "url", "retries", "batch")
    return [told(reward, full=full, aside=aside) for reward in rewards]


def _contents(judges: Sequence[Sequence[Reward]]) -> list[list[list[str]]]:
    """What the folders of the reward models hold; nothing where there are none."""
    every = list(chain.from_iterable(judges))
    found = {id(model): model.content() for model in models_of(every)}
    found |= {id(clip): clip_content(clip.path) for clip in clips_of(every)}
    return [[[found[id(one)] for one in (*models_of(own), *clips_of(own))] for own in judges]] if found else []


def _critic(critic: CriticPlan | None) -> list[Any]:
    """What the critic is, and whether every phase begins with another; wherever it was read."""
    if critic is None:
        return []
    return [["critic", critic.begin is not None, dict(critic.hf_config), _leaves(critic.shapes())]]


def _teachers(spec: RunSpec, cast: Cast | None) -> list[Any]:
    """What the teachers from folders are, and which phase learns from which; their parameters are in the states."""
    if cast is None or not cast.teachers:
        return []
    models = [[role, dict(model.hf_config), _leaves(model.shapes())] for role, model in cast.teachers.items()]
    taught = [(phase.name, phase.algorithm) for phase in spec.phases if isinstance(phase.algorithm, FlowTaught)]
    return [models, [[name, *(cast.folders[path] for path in folders_of(one))] for name, one in taught]]


def read_elsewhere(before: RunSpec, now: RunSpec) -> list[str]:
    """The folders of critics and teachers that are other ones now; a run that is continued has their parameters in its state."""
    return list(_differences({"phases": _roles(before)}, {"phases": _roles(now)}, ""))


def _paths(spec: RunSpec) -> Any:
    """Where the reward models are, by phase and place, and the critic and the teachers."""
    roles = _roles(spec)
    return {"phases": {phase.name: {"rewards": _judge_paths(phase)} | roles[phase.name] for phase in spec.phases}}


def _judge_paths(phase: Phase) -> dict[str, Any]:
    judges = ((str(k), reward) for k, reward in enumerate(phase.rewards))
    return {place: {"path": one.path} for place, one in judges if isinstance(one, ModelReward | ClipReward)}


def _roles(spec: RunSpec) -> dict[str, Any]:
    """The folders that roles are read from, by phase."""

    def of(algorithm: Any) -> dict[str, Any]:
        if isinstance(algorithm, PPO):
            return {"critic": {"path": algorithm.critic.path}}
        if not isinstance(algorithm, FlowTaught):
            return {}
        several = algorithm.teachers if isinstance(algorithm, FlowDistill) else []
        named = {str(place): {"path": teacher.path} for place, teacher in enumerate(several)}
        return {"teacher": algorithm.teacher} | ({"teachers": named} if named else {})

    found = {phase.name: of(phase.algorithm) for phase in spec.phases}
    return {name: {"algorithm": algorithm} if algorithm else {} for name, algorithm in found.items()}


def _tied(spec: RunSpec) -> bool:
    """Whether the steps of the last phase depend on how many there are: a rate decays over them, or a score ends them."""
    last = spec.phases[-1]
    schedules = [optimizer.schedule for optimizer in last.optimizers]
    return last.stop_at > 0 or any(s.kind != "constant" and not s.decay_steps for s in schedules)


def _changes(before: RunSpec, now: RunSpec, field: str) -> Iterator[str]:
    tied = _tied(before) or _tied(now)
    yield from _differences(_settings(before, field, tied, full=True), _settings(now, field, tied, full=True), "")
    if field == "phases":
        yield from _differences(_paths(before), _paths(now), "")
        yield from _differences({"consistency": before.consistency}, {"consistency": now.consistency}, "")


def _differences(before: Any, now: Any, path: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            yield from _differences(before.get(key), now.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for place, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from _differences(one, other, f"{path}.{place}")
    elif before != now:
        yield f"{path} was {_shown(before)} and is now {_shown(now)}"


def _shown(value: Any) -> str:
    text = "absent" if value is None else msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


def _leaves(params: Any) -> list[tuple[str, list[int], str]]:
    return [(path, list(leaf.shape), str(leaf.dtype)) for path, leaf in tree.leaves_with_path(params)]


def _content(example: Example | PictureRow | PairRow | PromptedRow) -> bytes:
    if isinstance(example, PairRow):
        labels = b"%d %d " % (example.label, example.other)
        return labels + example.chosen.tobytes() + example.rejected.tobytes()
    if isinstance(example, PromptedRow):
        return example.content
    if isinstance(example, PictureRow):
        return b"%d " % example.label + example.picture.tobytes()
    return b"%d " % len(example.tokens) + array("q", example.tokens).tobytes() + bytes(example.trained)


def _data(phase: PhasePlan) -> str:
    """A digest of what is trained on: tokens or pictures of a data set; prompts and rows, which rewards read, for generation."""
    found = hashlib.sha256()
    for example in phase.documents:
        found.update(_content(example))
    for prompt, row in zip(phase.prompts or (), phase.rows, strict=False):
        found.update(repr((prompt, sorted(row.items()))).encode())
    sources = [(source, len(list(own))) for source, own in groupby(getattr(row, "source", "") for row in phase.rows)]
    if phase.mixed or any(reward.sources for reward in phase.rewards):
        found.update(repr((phase.mixed, sources)).encode())
    return found.hexdigest()[:16]
