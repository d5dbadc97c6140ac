"""Rules between a specification and the contract of the pipeline that it trains: decided before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.execution import Acquisition
from areno_fn.contracts.pipeline_io import PipelineIOContract
from areno_fn.contracts.spec import ClipReward, FlowTaught, HFModel, HttpReward, Levels, Phase, RewardSpec, RunSpec


def check_pipeline(spec: RunSpec, contract: PipelineIOContract) -> None:
    """Refuses what the contract of a pipeline does not admit.

    Raises:
        SpecError: one line per problem, each naming the field, and the clause of the contract.
    """
    problems = [problem for phase in spec.phases for problem in _phase(phase, contract)]
    problems += [problem for phase in spec.phases for problem in _at_all_levels(spec, phase, contract)]
    if spec.evaluation is not None:
        problems += _rewards(spec.evaluation.rewards, "evaluation", contract)
        problems += _said("evaluation.denoising.guidance", contract.admit_guidance, spec.evaluation.denoising.guidance)
    if problems:
        raise SpecError("\n".join(problems))


def _phase(phase: Phase, contract: PipelineIOContract) -> Iterator[str]:
    where, algorithm = f"phases.{phase.name}.algorithm", phase.algorithm
    if algorithm.execution.acquisition is Acquisition.DATASET:
        yield from _said(where, contract.admit_objective, str(algorithm.__struct_config__.tag).removeprefix("flow_"))
    yield from _rewards(phase.rewards, f"phases.{phase.name}", contract)
    drawn = getattr(algorithm, "denoising", None)
    if isinstance(drawn, Levels):
        yield from _said(f"{where}.denoising.guidance", contract.admit_guidance, drawn.guidance)
    for name in ("reference_guidance", "teacher_guidance"):
        yield from _said(f"{where}.{name}", contract.admit_guidance, getattr(algorithm, name, 1.0))
    if phase.denoising is not None:
        yield from _said(f"phases.{phase.name}.denoising.guidance", contract.admit_guidance, phase.denoising.guidance)
    if getattr(algorithm, "condition_dropout", 0.0) and not contract.classifier_free:
        yield (
            f"{where}.condition_dropout: {contract.family} has no negative prompts, guidance: it is {contract.guidance!r}; "
            f"remove this"
        )


def _at_all_levels(spec: RunSpec, phase: Phase, contract: PipelineIOContract) -> Iterator[str]:
    """A generator of few steps is trained at all noise levels."""
    named = spec.model.pipeline.trained if isinstance(spec.model, HFModel) and spec.model.pipeline else []
    every = [part.name for part in contract.components if part.trained]
    if isinstance(phase.algorithm, FlowTaught) and named and set(named) != set(every):
        yield (
            f"phases.{phase.name}.algorithm: {phase.algorithm.__struct_config__.tag} trains at all noise levels, but "
            f"model.pipeline.trained leaves some to {' and '.join(name for name in every if name not in named)}; remove that"
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
