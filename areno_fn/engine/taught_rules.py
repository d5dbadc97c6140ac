"""Rules between the fields of algorithms that learn from a teacher: decided before a file is opened."""

from __future__ import annotations

from collections.abc import Iterator

from areno_fn.contracts.spec import FlowDistill, FlowMatched, FlowTaught, FlowTDM, FlowTDMR1, Phase, folders_of
from areno_fn.engine.flow_rules import comparison_problems, forgetting_problems


def taught_problems(phase: Phase, algorithm: FlowTaught) -> Iterator[str]:
    """A sentence for everything that cannot be meant."""
    where = f"phases.{phase.name}.algorithm"
    if isinstance(algorithm, FlowMatched) and algorithm.low >= algorithm.high:
        yield f"{where}.low: levels are drawn from {algorithm.low} to {algorithm.high}, which are none; lower it"
    if isinstance(algorithm, FlowTDM):
        yield from _between(algorithm, where)
    if isinstance(algorithm, FlowTDMR1):
        yield from _rewarded(phase, algorithm, where)
    if isinstance(algorithm, FlowDistill):
        yield from _several(phase, algorithm, where)
        yield from _distilled(algorithm, where)


def _between(algorithm: FlowTDM, where: str) -> Iterator[str]:
    """Levels begin where a step ends, and end where it began unless they are those above."""
    if algorithm.low != FlowTDM().low:
        yield f"{where}.low: levels begin where a step ends, and there is no other lowest one; remove this"
    if algorithm.query == "interval" and algorithm.high != FlowTDM().high:
        yield f"{where}.high: with query = 'interval' levels end where a step began; remove this, or use query = 'above'"


def _rewarded(phase: Phase, algorithm: FlowTDMR1, where: str) -> Iterator[str]:
    yield from comparison_problems(algorithm, where)
    yield from forgetting_problems(algorithm.slow, f"{where}.slow")
    if 0 < phase.batch.micro_rows < algorithm.samples:
        yield (
            f"phases.{phase.name}.batch.micro_rows: the {algorithm.samples} samples of a group are compared in one micro-batch; "
            f"use at least {algorithm.samples}, or 0"
        )
    if not algorithm.mixture and algorithm.guidance_reward != FlowTDMR1().guidance_reward:
        yield (
            f"{where}.guidance_reward: with mixture = 0 the teacher's guidance has no share of the reward; give mixture, or "
            f"remove this"
        )
    elif algorithm.teacher_guidance == 1 and algorithm.guidance_reward != FlowTDMR1().guidance_reward:
        yield (
            f"{where}.guidance_reward: a teacher that is not guided has no guidance to follow; give teacher_guidance, or "
            f"remove this"
        )


def _several(phase: Phase, algorithm: FlowDistill, where: str) -> Iterator[str]:
    """Every data set of the phase has one of several teachers, and they teach no others."""
    if algorithm.teacher and algorithm.teachers:
        yield f"{where}.teacher: it is one for all data sets, and `teachers` are given; remove one of them"
    sets = [source.name or str(place) for place, source in enumerate(phase.data)]
    taught = [name for teacher in algorithm.teachers for name in teacher.data]
    for place, teacher in enumerate(algorithm.teachers):
        for name in teacher.data:
            if name not in sets:
                yield (
                    f"{where}.teachers.{place}.data: there is no data set {name!r} in phases.{phase.name}.data; those there "
                    f"are called {', '.join(sets)}"
                )
    for name in sets if algorithm.teachers else ():
        if taught.count(name) != 1:
            yield f"{where}.teachers: the data set {name!r} has {taught.count(name)} of them; name it in the `data` of one"


def _distilled(algorithm: FlowDistill, where: str) -> Iterator[str]:
    levels = algorithm.denoising
    noisy = levels.dynamics != "ode"
    if not folders_of(algorithm) and algorithm.teacher_guidance == levels.guidance:
        yield (
            f"{where}.teacher: without a folder the teacher is the student as it begins, from which there is nothing to learn; "
            f"give a folder, or another teacher_guidance than the student's"
        )
    if noisy != (levels.level > 0):
        said = "adds no noise; remove level" if not noisy else "adds noise; give a level above 0, for example 0.7"
        yield f"{where}.denoising.level: it is {levels.level:g}, but the dynamics {levels.dynamics!r} {said}"
    if levels.dynamics == "cps" and levels.level > 1:
        yield f"{where}.denoising.level: the dynamics 'cps' takes levels up to 1, received {levels.level}"
    if noisy and levels.steps == 1:
        yield f"{where}.denoising.steps: the last step adds no noise, so that of 1 there is nothing to learn; use at least 2"
    if noisy != (algorithm.space == "gaussian"):
        right = "'gaussian'" if noisy else "'velocity', 'mean' or 'data'"
        yield f"{where}.space: steps by {levels.dynamics!r} are compared in {right}, received {algorithm.space!r}"
