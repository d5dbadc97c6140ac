"""The roles that algorithms of flow models have beside the actor: copies of it that are trained, and a teacher from a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from areno_fn.ckpt import hf
from areno_fn.contracts.errors import ModelError, SpecError
from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.key import Key
from areno_fn.contracts.pipeline_io import PipelineIOContract
from areno_fn.contracts.placement import Placement
from areno_fn.contracts.roles import Role
from areno_fn.contracts.spec import FlowTaught, HFModel, RunSpec
from areno_fn.engine.finetune import FinetunePlan, count
from areno_fn.engine.model import ModelPlan, from_folder
from areno_fn.engine.place import at
from areno_fn.models.flow_families import FlowFamily
from areno_fn.steps.recipes import ACTOR, TEACHER
from areno_fn.steps.variants import snapshot

_UNUSED = Key.of(0)
"""Names no draw: a teacher comes from a folder."""


@attrs.frozen(kw_only=True)
class Cast:
    """These roles, of which most runs have none.

    Attributes:
        finetune: of the actor; its copies are trained in the same way.
        copies: names of the trained ones, in order.
        teacher: the model of the folder; None where no phase names one.
    """

    finetune: FinetunePlan
    copies: tuple[str, ...] = ()
    teacher: ModelPlan | None = None

    @property
    def roles(self) -> tuple[Role, ...]:
        """None of them is part of the trained model."""
        trunk = next(role.trunk for role in self.finetune.roles.roles if role.name == ACTOR)
        found = tuple(Role(name=name, exported=False, trunk=trunk) for name in self.copies)
        return found if self.teacher is None else (*found, Role(name=TEACHER, trainable=False, exported=False))

    @property
    def teacher_policy(self) -> FlowPolicy | None:
        """The functions of the teacher."""
        return None if self.teacher is None else self.teacher.flow_policy

    @property
    def placements(self) -> dict[str, Mapping[str, Placement]]:
        """How ranks share each leaf of the trained ones."""
        return dict.fromkeys(self.copies, self.finetune.placements)

    def shapes(self) -> dict[str, Any]:
        """The parameters of each role as meta tensors."""
        actor = self.finetune.shapes()[ACTOR]
        return self._with_teacher({name: snapshot(actor) for name in self.copies}, None, None)

    def load(
        self, params: Mapping[str, Any], device: torch.device, progress: hf.Progress | None = None
    ) -> dict[str, Any]:
        """The parameters that a run begins with: copies of the actor's, and those of the folder."""
        return self._with_teacher({name: snapshot(params[ACTOR]) for name in self.copies}, device, progress)

    def describe(self) -> str:
        """What is beside the actor, in words; nothing where nothing is."""
        size = f"{count(self.finetune.shapes()[ACTOR]):,}"
        told = [f"{name} of {size}" for name in self.copies]
        if self.teacher is not None:
            told.append(f"a frozen teacher of {count(self.teacher.shapes()):,}")
        return f", and {' and '.join(told)}" if told else ""

    def _with_teacher(
        self, found: dict[str, Any], device: torch.device | None, progress: hf.Progress | None
    ) -> dict[str, Any]:
        teacher = self.teacher
        if teacher is None:
            return found
        if device is None:
            return found | {TEACHER: teacher.shapes()}
        return found | {TEACHER: teacher.load(_UNUSED, device, progress)}


def plan_cast(spec: RunSpec, model: ModelPlan, finetune: FinetunePlan) -> Cast:
    """The roles of a run beside its actor.

    Raises:
        SpecError: two phases name different teachers.
        ModelError: a folder holds no model of the same latents and classes.
        CheckpointError: it is damaged or incomplete.
    """
    using = [(phase.name, phase.algorithm) for phase in spec.phases if isinstance(phase.algorithm, FlowTaught)]
    copies = tuple(dict.fromkeys(role for _, algorithm in using for role in algorithm.roles if role != ACTOR))
    named = [(name, algorithm.teacher) for name, algorithm in using if algorithm.teacher]
    for name, path in named[1:]:
        if _place(path) != _place(named[0][1]):
            raise SpecError(
                f"phases.{name}.algorithm.teacher: {path!r} is another teacher than {named[0][1]!r} of phases.{named[0][0]}; "
                f"a run has one teacher, so give all phases the same path"
            )
    if not named:
        return Cast(finetune=finetune, copies=copies)
    with at(f"phases.{named[0][0]}.algorithm.teacher"):
        teacher = _teacher(named[0][1], spec, model)
    return Cast(finetune=finetune, copies=copies, teacher=teacher)


def _teacher(path: str, spec: RunSpec, model: ModelPlan) -> ModelPlan:
    own = spec.model if isinstance(spec.model, HFModel) else HFModel(path=path)
    found = from_folder(HFModel(path=path, dtype=own.dtype, pipeline=own.pipeline))
    mine, theirs = _makes(model), _makes(found)
    if mine != theirs:
        raise ModelError(f"{path} makes {theirs}, but the actor {mine}; a teacher makes what the actor makes")
    if model.pipeline is not None and found.pipeline is not None:
        _require_as_wide(model.pipeline.contract, found.pipeline.contract, path)
    return found


def _require_as_wide(actor: PipelineIOContract, teacher: PipelineIOContract, path: str) -> None:
    """A teacher is asked whatever the actor is asked."""
    if not actor.narrows(teacher):
        raise ModelError(
            f"{path} does not take all that the actor takes: inputs, guidance and sizes of its contract must be at least as wide"
        )


def _makes(model: ModelPlan) -> str:
    """What a model makes, and what it is told of it."""
    if model.medium == "text":
        return "text"
    shape = list(model.flow_policy.latent_shape)
    if isinstance(model.family, FlowFamily):
        return f"{shape} of {model.family.classes(model.config)} classes"
    return f"{shape} of the prompts of {model.family.name}"


def _place(path: str) -> str:
    """The folder that a path leads to, however it is written; what can be no path is refused where it is opened."""
    return os.path.realpath(path) if "\0" not in path else path
