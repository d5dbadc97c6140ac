"""Rules between a specification and what its model makes, text or pictures: decided before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import (
    Batch,
    DataSpec,
    Denoising,
    DigitsData,
    Evaluation,
    FlowAlgorithm,
    FlowGrouped,
    FlowGRPO,
    FlowNoised,
    FlowSFT,
    HFModel,
    Levels,
    Medium,
    ModelReward,
    Phase,
    RewardSpec,
    RunSpec,
)

_ALGORITHMS: dict[Medium, str] = {
    "text": "sft, dpo, grpo, gspo or ppo",
    "pictures": "flow_sft, flow_grpo, flow_nft or flow_awm",
}
_DATA: dict[Medium, str] = {"text": "jsonl, parquet, hf or arithmetic", "pictures": "digits"}
_OF_TEXT = ("micro_tokens", "max_length", "overlong")


def check_medium(spec: RunSpec, name: str, medium: Medium) -> None:
    """Refuses what belongs to models of another medium than the one that is trained.

    Args:
        spec: what is asked for.
        name: of the model's family, which makes `medium`.

    Raises:
        SpecError: one line per problem, each naming the field.
    """
    problems = [p for phase in spec.phases for p in _phase(phase, name, medium)]
    if medium == "pictures" and spec.tokenizer is not None:
        problems.append(f"tokenizer: {name} makes pictures and has no tokens; remove this")
    if spec.evaluation is not None:
        problems += _evaluation(spec.evaluation, name, medium)
    problems += _guided(spec, name)
    if problems:
        raise SpecError("\n".join(problems))


def _phase(phase: Phase, name: str, medium: Medium) -> Iterator[str]:
    where, algorithm = f"phases.{phase.name}", phase.algorithm
    of_pictures = isinstance(algorithm, FlowAlgorithm)
    if of_pictures != (medium == "pictures"):
        kind, other = algorithm.__struct_config__.tag, "pictures" if of_pictures else "text"
        yield f"{where}.algorithm: {kind} trains models that make {other}, but {name} makes {medium}; use {_ALGORITHMS[medium]}"
    yield from _data(phase.data, where, name, medium)
    if medium == "pictures":
        yield from _rewards(phase.rewards, where, name)
        for field in _OF_TEXT:
            if getattr(phase.batch, field) != getattr(Batch(), field):
                yield f"{where}.batch.{field}: it is about tokens, and {name} makes pictures; remove it"


def _guided(spec: RunSpec, name: str) -> Iterator[str]:
    """A model from scratch must have been trained without conditions before anything is led away from what it says then."""
    taught = isinstance(spec.model, HFModel)
    asked: list[tuple[str, Levels]] = []
    for phase in spec.phases:
        algorithm = phase.algorithm
        taught = taught or (isinstance(algorithm, FlowSFT) and algorithm.dropout > 0)
        if isinstance(algorithm, FlowGRPO | FlowNoised) and not taught:
            asked.append((f"phases.{phase.name}.algorithm.denoising.guidance", algorithm.denoising))
    if spec.evaluation is not None and not taught:
        asked.append(("evaluation.denoising.guidance", spec.evaluation.denoising))
    for where, drawn in asked:
        if drawn.guidance > 1:
            yield (
                f"{where}: nothing has taught {name} from scratch what to make without a condition; give a flow_sft phase "
                f"before it a dropout, or leave this at 1"
            )


def flow_problems(phase: Phase, algorithm: FlowGrouped) -> Iterator[str]:
    """What is wrong with an algorithm that denoises, whatever the model."""
    where = f"phases.{phase.name}.algorithm"
    if isinstance(algorithm, FlowGRPO) and algorithm.denoising.dynamics == "cps" and algorithm.denoising.level > 1:
        yield f"{where}.denoising.level: the dynamics 'cps' takes levels up to 1, received {algorithm.denoising.level}"
    if isinstance(algorithm, FlowGRPO) and not algorithm.kl_coef and algorithm.kl_space != FlowGRPO().kl_space:
        yield f"{where}.kl_space: without kl_coef there is no distance to measure; give kl_coef, or remove this"
    if algorithm.samples == 1 and "batch" not in (algorithm.baseline, algorithm.scale):
        yield f"{where}.samples: a group of 1 has nothing to be compared with; use at least 2"


def _data(data: Sequence[DataSpec], where: str, name: str, medium: Medium) -> Iterator[str]:
    for place, source in enumerate(data):
        if isinstance(source, DigitsData) != (medium == "pictures"):
            kind = source.__struct_config__.tag
            yield f"{where}.data.{place}: {kind!r} is not what {name} is trained on, which makes {medium}; use {_DATA[medium]}"


def _rewards(rewards: Sequence[RewardSpec], where: str, name: str) -> Iterator[str]:
    for place, reward in enumerate(rewards):
        if isinstance(reward, ModelReward):
            yield (
                f"{where}.rewards.{place}: a reward of kind 'model' judges text, but {name} makes pictures; "
                f"use kind 'function' with a function of (rows, pictures)"
            )


def _evaluation(spec: Evaluation, name: str, medium: Medium) -> Iterator[str]:
    yield from _data(spec.data, "evaluation", name, medium)
    if medium == "text":
        if spec.denoising != Denoising():
            yield f"evaluation.denoising: {name} makes text, which is drawn by `sampling`; remove this"
        return
    yield from _rewards(spec.rewards, "evaluation", name)
    if spec.sampling != Evaluation(data=[], rewards=[]).sampling:
        yield f"evaluation.sampling: {name} makes pictures, which are drawn by `denoising`; remove this"
