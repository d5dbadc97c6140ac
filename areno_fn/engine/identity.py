"""The identity of a run: digests of all that decides what its next step computes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from areno_fn import tree
from areno_fn.contracts.identity import RunIdentity, digest
from areno_fn.contracts.spec import Phase, RunSpec
from areno_fn.engine.model import ModelPlan
from areno_fn.engine.phases import PhasePlan
from areno_fn.steps.joins import Stage, stage_name


def identity_of(
    spec: RunSpec, model: ModelPlan, phases: Sequence[PhasePlan], losses: Mapping[str, Stage]
) -> RunIdentity:
    """What a saved state must agree with to continue this run.

    How long the last phase goes on, evaluation, logging and the cadence of checkpoints are left out: they do
    not change what a step computes. Data counts by its tokens and rows, not by its path.
    """
    return RunIdentity(
        family=model.family.name,
        model=digest(model.hf_config),
        phases=digest([_phase(phase, losses.get(phase.name), last=phase is spec.phases[-1]) for phase in spec.phases]),
        data=digest([_data(phase) for phase in phases]),
        parameters=digest(
            [(path, list(leaf.shape), str(leaf.dtype)) for path, leaf in tree.leaves_with_path(model.shapes())]
        ),
        optimizers=digest([phase.optimizers for phase in spec.phases]),
        seed=spec.seed,
    )


def _phase(phase: Phase, loss: Stage | None, *, last: bool) -> dict[str, Any]:
    kept = asdict(phase)
    for name in ("data", "optimizers", *(("steps", "epochs") if last and _length_free(phase) else ())):
        kept.pop(name)
    return kept if loss is None else kept | {"loss": stage_name(loss)}


def _length_free(phase: Phase) -> bool:
    """Whether the phase may be made longer without changing the steps before: no schedule decays over its length."""
    return all(o.schedule.kind == "constant" or o.schedule.decay_steps for o in phase.optimizers)


def _data(phase: PhasePlan) -> str:
    """A digest of what is trained on: tokens for a data set; prompts and rows, which rewards read, for generation."""
    found = hashlib.sha256()
    for example in phase.examples:
        found.update(repr((example.tokens, example.trained)).encode())
    for prompt, row in zip(phase.prompts or (), phase.rows, strict=False):
        found.update(repr((prompt, sorted(row.items()))).encode())
    return found.hexdigest()[:16]
