"""The roles that algorithms of flow models have beside the actor: copies of it that are trained, and teachers from folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from areno_fn.ckpt import hf
from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.key import Key
from areno_fn.contracts.pipeline_io import PipelineIOContract
from areno_fn.contracts.placement import Placement
from areno_fn.contracts.roles import Role
from areno_fn.contracts.spec import FlowTaught, HFModel, RunSpec, folders_of
from areno_fn.engine.finetune import FinetunePlan, count
from areno_fn.engine.model import ModelPlan, from_folder
from areno_fn.engine.place import at
from areno_fn.models.flow_families import FlowFamily
from areno_fn.steps.recipes import ACTOR, TEACHER, Teaching
from areno_fn.steps.variants import snapshot

_UNUSED = Key.of(0)
"""Names no draw: a teacher comes from a folder."""


@attrs.frozen(kw_only=True)
class Cast:
    """These roles, of which most runs have none.

    Attributes:
        finetune: of the actor; its copies are trained in the same way.
        copies: names of the trained ones, in order.
        teachers: the models of folders, by role.
        folders: the role of each folder, by its path as the specification writes it.
    """

    finetune: FinetunePlan
    copies: tuple[str, ...] = ()
    teachers: Mapping[str, ModelPlan] = attrs.field(factory=dict)
    folders: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def roles(self) -> tuple[Role, ...]:
        """None of them is part of the trained model."""
        trunk = next(role.trunk for role in self.finetune.roles.roles if role.name == ACTOR)
        trained = [Role(name=name, exported=False, trunk=trunk) for name in self.copies]
        return (*trained, *(Role(name=name, trainable=False, exported=False) for name in self.teachers))

    @property
    def teaching(self) -> dict[str, Teaching]:
        """The teachers by path."""
        return {
            path: Teaching(role=role, policy=self.teachers[role].flow_policy) for path, role in self.folders.items()
        }

    @property
    def placements(self) -> dict[str, Mapping[str, Placement]]:
        """How ranks share each leaf of the trained ones."""
        return dict.fromkeys(self.copies, self.finetune.placements)

    def shapes(self) -> dict[str, Any]:
        """The parameters of each role as meta tensors."""
        actor = self.finetune.shapes()[ACTOR]
        frozen = {role: teacher.shapes() for role, teacher in self.teachers.items()}
        return {name: snapshot(actor) for name in self.copies} | frozen

    def load(
        self, params: Mapping[str, Any], device: torch.device, progress: hf.Progress | None = None
    ) -> dict[str, Any]:
        """The parameters that a run begins with: copies of the actor's, and those of the folders."""
        frozen = {role: teacher.load(_UNUSED, device, progress) for role, teacher in self.teachers.items()}
        return {name: snapshot(params[ACTOR]) for name in self.copies} | frozen

    def describe(self) -> str:
        """What is beside the actor, in words; nothing where nothing is."""
        size = f"{count(self.finetune.shapes()[ACTOR]):,}"
        told = [f"{name} of {size}" for name in self.copies]
        told += [f"a frozen {role} of {count(teacher.shapes()):,}" for role, teacher in self.teachers.items()]
        return f", and {' and '.join(told)}" if told else ""


def teacher_roles(spec: RunSpec) -> dict[str, tuple[str, str]]:
    """The teachers' folders of a run, by path as it is written: the role that each is read into, and where it is first named.

    A folder has one role, however often it is named: `teacher`, then `teacher_2` and so on.
    """
    found: dict[str, tuple[str, str]] = {}
    roles: dict[str, str] = {}
    for phase in spec.phases:
        if not isinstance(phase.algorithm, FlowTaught):
            continue
        for place, path in enumerate(folders_of(phase.algorithm)):
            role = TEACHER if not roles else f"{TEACHER}_{len(roles) + 1}"
            role = roles.setdefault(_place(path), role)
            field = "teacher" if phase.algorithm.teacher else f"teachers.{place}.path"
            found.setdefault(path, (role, f"phases.{phase.name}.algorithm.{field}"))
    return found


def plan_cast(spec: RunSpec, model: ModelPlan, finetune: FinetunePlan) -> Cast:
    """The roles of a run beside its actor.

    Raises:
        ModelError: a teacher's folder holds no model of the same latents and classes.
        CheckpointError: it is damaged or incomplete.
    """
    using = [phase.algorithm for phase in spec.phases if isinstance(phase.algorithm, FlowTaught)]
    copies = tuple(dict.fromkeys(role for algorithm in using for role in algorithm.roles if role != ACTOR))
    named, teachers = teacher_roles(spec), {}
    for path, (role, where) in named.items():
        if role not in teachers:
            with at(where):
                teachers[role] = _teacher(path, spec, model)
    return Cast(
        finetune=finetune, copies=copies, teachers=teachers, folders={path: role for path, (role, _) in named.items()}
    )


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
