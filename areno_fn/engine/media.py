"""Rules between a specification and what its model makes, text or pictures: decided before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

import attrs

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import (
    AlgorithmSpec,
    Batch,
    ClipReward,
    DataSpec,
    Denoising,
    DigitPairsData,
    DigitsData,
    Evaluation,
    FlowAlgorithm,
    FlowDPO,
    Lora,
    Medium,
    ModelReward,
    Phase,
    RewardSpec,
    RunSpec,
    ScratchModel,
    StoredData,
)
from areno_fn.engine.flow_rules import guidance_problems, strength_problems

_DATA: dict[Medium, str] = {"text": "jsonl, parquet, hf or arithmetic", "pictures": "digits"}
_OF_TEXT = ("micro_tokens", "max_length", "overlong")


@attrs.frozen(kw_only=True)
class _Model:
    """What is trained.

    Attributes:
        name: of its family.
        medium: what it makes.
        prompted: it makes pictures of prompts, and not of classes.
        videos: these move.
    """

    name: str
    medium: Medium
    prompted: bool
    videos: bool

    @property
    def makes(self) -> str:
        """What it makes, in words."""
        return f"{self.name} makes {'videos' if self.videos else self.medium}"


def check_medium(spec: RunSpec, name: str, medium: Medium, *, prompted: bool = False, videos: bool = False) -> None:
    """Refuses what belongs to models of another medium than the one that is trained.

    Args:
        spec: what is asked for.
        name: of the model's family, which makes `medium`.
        prompted: it makes pictures of prompts, and not of classes.
        videos: these move.

    Raises:
        SpecError: one line per problem, each naming the field.
    """
    model = _Model(name=name, medium=medium, prompted=prompted, videos=videos)
    problems = [p for phase in spec.phases for p in _phase(phase, model)]
    if medium == "pictures" and spec.tokenizer is not None:
        problems.append(f"tokenizer: {model.makes} and has no tokens; remove this")
    if medium == "pictures":
        problems += _unmoved(spec, name)
    if spec.evaluation is not None:
        problems += _evaluation(spec.evaluation, model)
    problems += guidance_problems(spec, name)
    if not prompted:
        problems += strength_problems(spec, name)
    if problems:
        raise SpecError("\n".join(problems))


def _phase(phase: Phase, model: _Model) -> Iterator[str]:
    where, algorithm, medium = f"phases.{phase.name}", phase.algorithm, model.medium
    of_pictures = isinstance(algorithm, FlowAlgorithm)
    if of_pictures != (medium == "pictures"):
        kind, other = algorithm.__struct_config__.tag, "pictures" if of_pictures else "text"
        yield f"{where}.algorithm: {kind} trains models that make {other}, but {model.makes}; use {_algorithms(medium)}"
    if medium == "text" and phase.denoising is not None:
        yield f"{where}.denoising: {model.makes}, which is drawn by `sampling`; remove this"
    yield from _data(phase.data, where, model)
    if medium == "pictures":
        yield from _rewards(phase.rewards, where, model)
        for field in _OF_TEXT:
            if getattr(phase.batch, field) != getattr(Batch(), field):
                yield f"{where}.batch.{field}: it is about tokens, and {model.makes}; remove it"
    else:
        yield from _clips(phase.rewards, where, model)
    if medium == "pictures" and phase.capture:
        yield f"{where}.capture: {model.makes}, and what its updates are made of may wait for the host; remove this"
    if medium == "text" and phase.batch.micro_rows:
        yield f"{where}.batch.micro_rows: it is about pictures, and {model.makes}; use micro_tokens"
    if isinstance(algorithm, FlowAlgorithm) and medium == "pictures":
        yield from _paired(phase, where)


def _unmoved(spec: RunSpec, name: str) -> Iterator[str]:
    """A flow model from scratch ends in a map of zeros, before which nothing has a gradient until that has moved."""
    lora = spec.finetune if isinstance(spec.finetune, Lora) else None
    if isinstance(spec.model, ScratchModel) and lora is not None and not (lora.targets or lora.adapter):
        yield (
            f"finetune: the output of {name} from scratch is 0, so that adapters in its layers have no gradient; train it whole, "
            f"or give model.path"
        )


def _algorithms(medium: Medium) -> str:
    """The algorithms of a medium, in words."""
    kinds = [kind for kind in get_args(AlgorithmSpec) if issubclass(kind, FlowAlgorithm) == (medium == "pictures")]
    names = [str(kind.__struct_config__.tag) for kind in kinds]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _paired(phase: Phase, where: str) -> Iterator[str]:
    """Pairs are for algorithms that compare two pictures of a data set, and for no others."""
    wanted = isinstance(phase.algorithm, FlowDPO)
    for place, source in enumerate(phase.data):
        if isinstance(source, DigitPairsData | DigitsData) and isinstance(source, DigitPairsData) != wanted:
            kind, right = ("digits", "digit_pairs") if wanted else ("digit_pairs", "digits")
            told = "compares pairs of pictures" if wanted else "takes single pictures"
            tag = phase.algorithm.__struct_config__.tag
            yield f"{where}.data.{place}: {tag} {told}, and {kind!r} is none of these; use {right}"


def _data(data: Sequence[DataSpec], where: str, model: _Model) -> Iterator[str]:
    medium, name = model.medium, model.name
    for place, source in enumerate(data):
        if model.prompted:
            if not isinstance(source, StoredData):
                kind = source.__struct_config__.tag
                yield f"{where}.data.{place}: {kind!r} has no prompts, of which {model.makes}; use jsonl, parquet or hf"
            continue
        if isinstance(source, DigitsData | DigitPairsData) != (medium == "pictures"):
            kind = source.__struct_config__.tag
            yield f"{where}.data.{place}: {kind!r} is not what {name} is trained on, which makes {medium}; use {_DATA[medium]}"


def _rewards(rewards: Sequence[RewardSpec], where: str, model: _Model) -> Iterator[str]:
    others = "" if model.videos else "kind 'clip' or 'http', or "
    for place, reward in enumerate(rewards):
        if isinstance(reward, ModelReward):
            yield (
                f"{where}.rewards.{place}: a reward of kind 'model' judges text, but {model.makes}; use "
                f"{others or 'kind '}'function' with a function of (rows, pictures)"
            )


def _clips(rewards: Sequence[RewardSpec], where: str, model: _Model) -> Iterator[str]:
    for place, reward in enumerate(rewards):
        if isinstance(reward, ClipReward):
            yield f"{where}.rewards.{place}: a reward of kind 'clip' judges pictures, but {model.makes}; use another"


def _evaluation(spec: Evaluation, model: _Model) -> Iterator[str]:
    yield from _data(spec.data, "evaluation", model)
    for place, source in enumerate(spec.data):
        if isinstance(source, DigitPairsData):
            yield f"evaluation.data.{place}: an evaluation draws, and of 'digit_pairs' there is nothing to draw for; use digits"
    if model.medium == "text":
        yield from _clips(spec.rewards, "evaluation", model)
        if spec.denoising != Denoising():
            yield f"evaluation.denoising: {model.makes}, which is drawn by `sampling`; remove this"
        return
    yield from _rewards(spec.rewards, "evaluation", model)
    if spec.sampling != Evaluation(data=[], rewards=[]).sampling:
        yield f"evaluation.sampling: {model.makes}, which are drawn by `denoising`; remove this"
