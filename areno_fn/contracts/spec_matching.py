"""What a specification says of flow models that learn from another one, their teacher, on what they have drawn themselves."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from areno_fn.contracts.execution import GENERATION_NONE, GENERATION_REWARD, ExecutionContract
from areno_fn.contracts.spec_base import Coefficient, Place, Rate, Samples, Scale, Spec, Turns
from areno_fn.contracts.spec_flow import Guidance, Levels, Shift, Steps, Times
from areno_fn.contracts.spec_flow_noised import Forgetting


class FewSteps(Levels, frozen=True, kw_only=True):
    """How a generator draws, without noise in its steps; what it is trained at is what it can be drawn with."""

    steps: Steps = 4


class StudentDenoising(Levels, frozen=True, kw_only=True):
    """How a student draws. With dynamics other than "ode" all steps but the last add noise, of which `level` is eta."""

    steps: Steps = 10
    dynamics: Literal["ode", "flow_sde", "dance_sde", "cps"] = "ode"
    level: Annotated[float, Meta(ge=0, le=100)] = 0.0


class FlowTaught(Spec, frozen=True, kw_only=True):
    """What the algorithms have in common that learn from a teacher: the model that the folder `teacher` holds, or the
    actor as the phase begins. It is frozen, and asked with its own guidance.
    """

    execution: ClassVar[ExecutionContract] = GENERATION_NONE
    roles: ClassVar[tuple[str, ...]] = ("actor",)

    samples: Samples = 1
    teacher: str = ""
    teacher_guidance: Guidance = 1.0


class FlowMatched(FlowTaught, frozen=True, kw_only=True):
    """What the algorithms have in common that make a generator of few steps, which is the actor.

    The role `fake`, which begins as a copy of it, follows what it makes, with `fake_updates` for each of its own. Both
    judges are asked at levels between `low` and `high`, drawn from `times` with `shift`.
    """

    roles: ClassVar[tuple[str, ...]] = ("actor", "fake")

    denoising: FewSteps = field(default_factory=FewSteps)
    fake_updates: Turns = 5
    times: Times = "uniform"
    shift: Shift = 1.0
    low: Annotated[float, Meta(ge=0, lt=1)] = 0.02
    high: Annotated[float, Meta(gt=0, le=1)] = 0.98


class FlowDMD2(FlowMatched, frozen=True, kw_only=True, tag="flow_dmd2", tag_field="kind"):
    """Distribution matching distillation: what the generator sees in one of its states is moved from where the fake is to
    where the teacher is.
    """


class FlowMatchedAlong(FlowMatched, frozen=True, kw_only=True):
    """What those have in common that match the states of all steps, each noised on from its own level.

    The judges of a step are asked above its end, "above", or only between its ends, "interval". `huber` is the width within
    which the generator's loss is quadratic, 0 for everywhere, and `snr_cap` bounds what little noise counts for the fake, 0: all
    counts alike.
    """

    query: Literal["above", "interval"] = "above"
    huber: Annotated[float, Meta(ge=0, le=1000)] = 1e-3
    snr_cap: Rate = 5.0


class FlowTDM(FlowMatchedAlong, frozen=True, kw_only=True, tag="flow_tdm", tag_field="kind"):
    """Trajectory distribution matching: the states of all steps are moved, in place of what is seen in one."""


class FlowTDMR1(FlowMatchedAlong, frozen=True, kw_only=True, tag="flow_tdm_r1", tag_field="kind"):
    """Trajectory distribution matching towards rewards: a third role, `surrogate`, learns which samples of a prompt are
    preferred, and the generator follows it.

    Of the reward's direction the teacher's guidance has the share `mixture`, scaled by `guidance_reward`, and the
    surrogate the rest. The surrogate is held to its own average, which follows it by `slow`, counted in its updates.
    """

    execution: ClassVar[ExecutionContract] = GENERATION_REWARD
    roles: ClassVar[tuple[str, ...]] = ("actor", "fake", "surrogate")

    samples: Samples = 8
    combine: Literal["sum", "each"] = "sum"
    baseline: Literal["group", "leave_one_out", "batch"] = "group"
    scale: Literal["group", "batch", "none"] = "group"
    mixture: Annotated[float, Meta(ge=0, lt=1)] = 0.3
    guidance_reward: Coefficient = 4.5
    beta: Scale = 1.0
    max_advantage: Annotated[float, Meta(gt=0)] = 5.0
    trust: Rate = 1e-3
    runaway: Rate = 0.05
    anchor: Coefficient = 1e-3
    slow: Forgetting = field(default_factory=lambda: Forgetting(start=1e-3, rate=1e-3, cap=0.3))


class Teacher(Spec, frozen=True, kw_only=True):
    """A folder that teaches what is drawn for the prompts of some data sets, by their names."""

    path: Place
    data: Annotated[list[str], Meta(min_length=1)]


class FlowDistill(FlowTaught, frozen=True, kw_only=True, tag="flow_distill", tag_field="kind"):
    """On-policy distillation: in the states that the student reaches, it is drawn to what the teacher would do.

    In the place of one teacher there may be `teachers`, each of its own data sets. The distance of a step is measured between
    velocities, the means of steps, or predicted data; of noisy steps it is the KL divergence, "gaussian". `normalised`
    divides it by the mean absolute difference.
    """

    teachers: list[Teacher] = field(default_factory=list)
    denoising: StudentDenoising = field(default_factory=StudentDenoising)
    space: Literal["velocity", "mean", "data", "gaussian"] = "velocity"
    normalised: bool = False


def folders_of(algorithm: FlowTaught) -> tuple[str, ...]:
    """The folders of an algorithm's teachers, in order; none where the actor as the phase begins is the teacher."""
    several = [teacher.path for teacher in algorithm.teachers] if isinstance(algorithm, FlowDistill) else []
    return (*([algorithm.teacher] if algorithm.teacher else []), *several)
