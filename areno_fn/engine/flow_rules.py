"""Rules between the fields of algorithms that denoise, whatever the model: decided before a file is opened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from areno_fn.contracts.spec import (
    Denoising,
    FlowAWM,
    FlowCoupled,
    FlowCRD,
    FlowDGPO,
    FlowDPO,
    FlowDPPO,
    FlowGrouped,
    FlowNoised,
    FlowOnlineDPO,
    FlowReferred,
    FlowSFT,
    FlowTaught,
    FlowTDMR1,
    FlowWhole,
    Forgetting,
    HFModel,
    Levels,
    Lora,
    NoisyDenoising,
    Phase,
    RunSpec,
    copies_of,
    folders_of,
    refers,
)


def flow_problems(spec: RunSpec, phase: Phase, algorithm: FlowReferred) -> Iterator[str]:
    """A sentence for everything that cannot be meant."""
    where = f"phases.{phase.name}.algorithm"
    yield from _reference(spec, algorithm, where)
    yield from _micro_rows(phase, algorithm)
    if not isinstance(algorithm, FlowGrouped):
        return
    yield from _groups(phase, algorithm, where)
    yield from _average(phase, algorithm, where)
    for name, copy in copies_of(algorithm).items():
        yield from forgetting_problems(copy, f"{where}.{name}")
    if isinstance(algorithm, FlowCoupled):
        yield from _noisy(algorithm.denoising, f"{where}.denoising")
        if not algorithm.kl_coef and algorithm.kl_space != FlowCoupled().kl_space:
            yield f"{where}.kl_space: without kl_coef there is no distance to measure; give kl_coef, or remove this"
    if isinstance(algorithm, FlowDPPO) and not algorithm.threshold and algorithm.mask_space != FlowDPPO().mask_space:
        yield f"{where}.mask_space: with threshold = 0 a step has moved too far in any space; give threshold, or remove this"
    if isinstance(algorithm, FlowNoised):
        yield from _levels(algorithm, where)
    if isinstance(algorithm, FlowCRD) and not algorithm.kl_coef:
        for name in ("kl_floor", "reference_guidance"):
            if getattr(algorithm, name) != getattr(FlowCRD(), name):
                yield f"{where}.{name}: without kl_coef there is no distance to weigh; give kl_coef, or remove this"
    if isinstance(algorithm, FlowOnlineDPO):
        yield from _preference(algorithm, where)


def uses_average(algorithm: FlowGrouped) -> bool:
    """Whether an algorithm reads the average of the actor."""
    return algorithm.draw_with == "ema" or (isinstance(algorithm, FlowAWM) and algorithm.ema_coef > 0)


def guidance_problems(spec: RunSpec, name: str) -> Iterator[str]:
    """A model from scratch must have been trained without conditions before anything is led away from what it says then.

    Args:
        spec: what is asked for.
        name: of the model's family.
    """
    taught = isinstance(spec.model, HFModel)
    asked: list[tuple[str, float]] = []
    for phase in spec.phases:
        algorithm, where = phase.algorithm, f"phases.{phase.name}.algorithm"
        taught = taught or (isinstance(algorithm, FlowSFT) and algorithm.condition_dropout > 0)
        drawn = getattr(algorithm, "denoising", None)
        if isinstance(drawn, Levels) and not taught:
            asked.append((f"{where}.denoising.guidance", drawn.guidance))
        if isinstance(algorithm, FlowDGPO | FlowCRD) and refers(algorithm) and not taught:
            asked.append((f"{where}.reference_guidance", algorithm.reference_guidance))
        if isinstance(algorithm, FlowTaught) and not folders_of(algorithm) and not taught:
            asked.append((f"{where}.teacher_guidance", algorithm.teacher_guidance))
        if phase.denoising is not None and not taught:
            asked.append((f"phases.{phase.name}.denoising.guidance", phase.denoising.guidance))
    if spec.evaluation is not None and not taught:
        asked.append(("evaluation.denoising.guidance", spec.evaluation.denoising.guidance))
    for where, guidance in asked:
        if guidance > 1:
            yield (
                f"{where}: nothing has taught {name} from scratch what to make without a condition; give a flow_sft phase "
                f"before it a condition_dropout, or set this to 1"
            )


def strength_problems(spec: RunSpec, name: str) -> Iterator[str]:
    """What begins with noise makes all steps.

    Args:
        spec: what is asked for.
        name: of the model's family.
    """
    drawn: list[tuple[str, Any]] = []
    for phase in spec.phases:
        drawn.append((f"phases.{phase.name}.algorithm.denoising", getattr(phase.algorithm, "denoising", None)))
        drawn.append((f"phases.{phase.name}.denoising", phase.denoising))
    if spec.evaluation is not None:
        drawn.append(("evaluation.denoising", spec.evaluation.denoising))
    for where, levels in drawn:
        if isinstance(levels, Denoising | NoisyDenoising) and levels.strength:
            yield f"{where}.strength: this {name} begins with noise and makes all steps; remove it"


def _reference(spec: RunSpec, algorithm: FlowReferred, where: str) -> Iterator[str]:
    if not refers(algorithm):
        for name in ("reference", "reference_every"):
            if getattr(algorithm, name) != getattr(FlowReferred(), name):
                yield f"{where}.{name}: without kl_coef there is no reference; give kl_coef, or remove this"
    elif algorithm.reference == "base":
        if not isinstance(spec.finetune, Lora):
            yield f"{where}.reference: 'base' is the model without its adapters, and this run trains none; use 'start'"
        if algorithm.reference_every:
            yield f"{where}.reference_every: the model without its adapters never moves; remove this, or use reference 'start'"


def _micro_rows(phase: Phase, algorithm: FlowReferred) -> Iterator[str]:
    most, least = phase.batch.micro_rows, 1
    if isinstance(algorithm, FlowDPO | FlowOnlineDPO):
        least, what = 2, "both pictures of a pair"
    elif isinstance(algorithm, FlowWhole):
        least, what = algorithm.samples, f"the {algorithm.samples} samples of a group"
    if 0 < most < least:
        yield f"phases.{phase.name}.batch.micro_rows: {what} are compared in one micro-batch; use at least {least}, or 0"


def forgetting_problems(copy: Forgetting, where: str) -> Iterator[str]:
    """What cannot be meant of how a copy follows its role."""
    if copy.start > copy.cap:
        yield (
            f"{where}.start: a share that begins at {copy.start:g} is above its largest, cap = {copy.cap:g}; lower it, or raise "
            f"cap"
        )
    if not copy.start and not copy.rate:
        yield f"{where}.rate: a share that begins at 0 and stays there makes no copy that differs; give rate, or start"


def comparison_problems(algorithm: FlowGrouped | FlowTDMR1, where: str) -> Iterator[str]:
    """What cannot be meant of how the samples of a prompt are compared."""
    if algorithm.samples == 1 and not _across(algorithm):
        yield f"{where}.samples: a group of 1 has nothing to be compared with; use at least 2"
    if algorithm.combine == "each":
        for name in ("baseline", "scale"):
            if getattr(algorithm, name) != getattr(type(algorithm)(), name):
                yield (
                    f"{where}.{name}: with combine = 'each' rewards are compared within groups and scaled over the batch; "
                    f"remove this"
                )
    elif algorithm.baseline == "batch" and algorithm.scale == "group":
        yield (
            f"{where}.scale: a deviation from the mean of the batch cannot be divided by that of its group, which is 0 where its "
            f"rewards are equal; use 'batch' or 'none'"
        )


def _across(algorithm: FlowGrouped | FlowTDMR1) -> bool:
    """Whether samples of several prompts are compared."""
    return algorithm.combine == "sum" and "batch" in (algorithm.baseline, algorithm.scale)


def _groups(phase: Phase, algorithm: FlowGrouped, where: str) -> Iterator[str]:
    yield from comparison_problems(algorithm, where)
    if algorithm.samples == 1 and isinstance(algorithm, FlowOnlineDPO) and _across(algorithm):
        yield f"{where}.samples: a group of 1 makes no pair; use at least 2"
    if isinstance(algorithm, FlowWhole) and algorithm.minibatches > phase.batch.rows:
        yield (
            f"{where}.minibatches: {algorithm.minibatches} mini-batches of whole groups cannot be cut from "
            f"{phase.batch.rows} prompts"
        )


def _average(phase: Phase, algorithm: FlowGrouped, where: str) -> Iterator[str]:
    if algorithm.draw_with == "ema" and copies_of(algorithm):
        yield f"{where}.draw_with: a copy of the actor draws, as `old` or `sampler` says; remove one of them"
    if uses_average(algorithm) and phase.ema is None:
        name = "draw_with" if algorithm.draw_with == "ema" else "ema_coef"
        yield f"{where}.{name}: the phase keeps no average of the actor; give it `ema`, or remove this"


def _preference(algorithm: FlowOnlineDPO, where: str) -> Iterator[str]:
    if algorithm.kl_coef:
        yield f"{where}.kl_coef: the preference holds the actor near its reference by beta; remove this"
    for name in ("baseline", "scale", "max_advantage"):
        if getattr(algorithm, name) != getattr(FlowOnlineDPO(), name):
            yield f"{where}.{name}: of a group only the best and the worst count, and not by how much; remove this"


def _noisy(drawn: NoisyDenoising, where: str) -> Iterator[str]:
    if drawn.dynamics == "cps" and drawn.level > 1:
        yield f"{where}.level: the dynamics 'cps' takes levels up to 1, received {drawn.level}"
    outside = [step for step in drawn.noisy if not -drawn.steps <= step < drawn.steps]
    if outside:
        yield f"{where}.noisy: there is no step {outside[0]} of {drawn.steps}; steps are numbered from 0, or from the end by -1"
        return
    chosen = {step % drawn.steps for step in drawn.noisy}
    among = len(chosen) or drawn.steps - 1
    if drawn.dynamics == "cps" and drawn.steps - 1 in chosen:
        yield f"{where}.noisy: the last step of the dynamics 'cps' ends at the data and has no noise; leave it out"
    if drawn.count > among:
        yield f"{where}.count: {drawn.count} noisy steps cannot be chosen among {among}"
    if drawn.window and not drawn.count:
        yield f"{where}.window: it needs a count of successive steps; give `count`, or remove this"


def _levels(algorithm: FlowNoised, where: str) -> Iterator[str]:
    if algorithm.times != "grid":
        return
    if algorithm.shift != 1:
        yield f"{where}.shift: the levels of the grid are shifted by denoising.shift; remove this"
    if int(algorithm.denoising.steps * algorithm.until) < 1:
        yield f"{where}.until: no step of {algorithm.denoising.steps} begins in that part of the way; raise it"
