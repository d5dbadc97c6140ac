"""Rules between a specification and the contract of the pipeline that it trains: decided before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.execution import Acquisition
from areno_fn.contracts.flow_adapter import NoiseLevels
from areno_fn.contracts.pipeline_io import PipelineIOContract
from areno_fn.contracts.spec import ClipReward, FlowTaught, HFModel, HttpReward, Levels, Phase, RewardSpec, RunSpec
from areno_fn.engine.flow_rules import strength_problems
from areno_fn.engine.place import at
from areno_fn.steps.recipes.flow_drawing import schedule_of

_GUIDED = ("reference", "teacher")
"""Who may have guidance beside what draws."""


def check_pipeline(spec: RunSpec, contract: PipelineIOContract) -> None:
    """Refuses what the contract of a pipeline does not admit.

    Raises:
        SpecError: one line per problem, each naming the field, and the clause of the contract.
    """
    problems = [problem for phase in spec.phases for problem in _phase(phase, contract)]
    problems += [problem for phase in spec.phases for problem in _few_steps(spec, phase, contract)]
    problems += _unguided(spec)
    if contract.initial == "noise":
        problems += strength_problems(spec, contract.family)
    if spec.evaluation is not None:
        problems += _rewards(spec.evaluation.rewards, "evaluation", contract)
        problems += _said("evaluation.denoising.guidance", contract.admit_guidance, spec.evaluation.denoising.guidance)
    if problems:
        raise SpecError("\n".join(problems))


def check_steps(spec: RunSpec, levels: NoiseLevels) -> None:
    """Refuses evaluations that would make no step; `levels` are those of the pipeline's own scheduler.

    Raises:
        SpecError: names the field.
    """
    drawn = [(f"phases.{phase.name}.denoising", phase.denoising) for phase in spec.phases]
    drawn += [] if spec.evaluation is None else [("evaluation.denoising", spec.evaluation.denoising)]
    for where, denoising in drawn:
        if denoising is not None:
            with at(where):
                schedule_of(denoising, levels)


def _phase(phase: Phase, contract: PipelineIOContract) -> Iterator[str]:
    where, algorithm = f"phases.{phase.name}.algorithm", phase.algorithm
    if algorithm.execution.acquisition is Acquisition.DATASET:
        yield from _said(where, contract.admit_objective, str(algorithm.__struct_config__.tag).removeprefix("flow_"))
    yield from _rewards(phase.rewards, f"phases.{phase.name}", contract)
    drawn = getattr(algorithm, "denoising", None)
    if isinstance(drawn, Levels):
        yield from _said(f"{where}.denoising.guidance", contract.admit_guidance, drawn.guidance)
    for who in _GUIDED:
        name = f"{who}_guidance"
        yield from _said(f"{where}.{name}", contract.admit_guidance, getattr(algorithm, name, 1.0))
    if phase.denoising is not None:
        yield from _said(f"phases.{phase.name}.denoising.guidance", contract.admit_guidance, phase.denoising.guidance)
    if getattr(algorithm, "condition_dropout", 0.0) and not contract.classifier_free:
        yield (
            f"{where}.condition_dropout: {contract.family} has no negative prompts, guidance: it is {contract.guidance!r}; "
            f"remove this"
        )


def _unguided(spec: RunSpec) -> Iterator[str]:
    """What shapes guidance is for runs that have some."""
    said = spec.model.pipeline if isinstance(spec.model, HFModel) else None
    given = {} if said is None else {"guidance_2": said.guidance_2 > 0, "streams": said.streams is not None}
    drawn: list[Any] = [None if spec.evaluation is None else spec.evaluation.denoising]
    for phase in spec.phases:
        drawn += [phase.denoising, getattr(phase.algorithm, "denoising", None)]
    scales = [levels.guidance for levels in drawn if isinstance(levels, Levels)]
    scales += [getattr(phase.algorithm, f"{who}_guidance", 1.0) for phase in spec.phases for who in _GUIDED]
    for name in (name for name, is_given in given.items() if is_given and all(scale == 1 for scale in scales)):
        yield f"model.pipeline.{name}: nothing in this run has guidance; give a denoising `guidance`, or remove this"


def _few_steps(spec: RunSpec, phase: Phase, contract: PipelineIOContract) -> Iterator[str]:
    """A generator of few steps begins with noise, and is trained at all of its levels."""
    if not isinstance(phase.algorithm, FlowTaught):
        return
    where, kind = f"phases.{phase.name}.algorithm", phase.algorithm.__struct_config__.tag
    named = spec.model.pipeline.trained if isinstance(spec.model, HFModel) and spec.model.pipeline else []
    every = [part.name for part in contract.components if part.trained]
    if named and set(named) != set(every):
        yield (
            f"{where}: {kind} trains at all noise levels, but model.pipeline.trained leaves some to "
            f"{' and '.join(name for name in every if name not in named)}; remove that"
        )
    if contract.initial != "noise":
        yield (
            f"{where}: {kind} trains what draws from noise, but {contract.family} begins with what it is given, initial: it is "
            f"{contract.initial!r}; use another algorithm"
        )


def _rewards(rewards: Sequence[RewardSpec], where: str, contract: PipelineIOContract) -> Iterator[str]:
    """Judges of single pictures are asked about no videos."""
    if all(output.type != "video" for output in contract.outputs):
        return
    for place, reward in enumerate(rewards):
        if isinstance(reward, ClipReward | HttpReward):
            yield (
                f"{where}.rewards.{place}: a reward of kind {reward.__struct_config__.tag!r} judges single pictures, but "
                f"{contract.family} makes videos; use kind 'function' with a function of (rows, pictures)"
            )


def _said(where: str, admit: Callable[[Any], None], value: Any) -> Iterator[str]:
    try:
        admit(value)
    except SpecError as error:
        yield f"{where}: {error}"
