"""Named algorithms: each is a short composition of stages that can be used alone.

A recipe turns a specification into an `Algorithm`: pure functions from a state and a batch to a state and
metrics. What has effects (drawing rows, asking rewards, writing files) happens between them, in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.execution import DATASET_NONE, GENERATION_NONE, GENERATION_REWARD, ExecutionContract
from areno_fn.contracts.spec import (
    DPO,
    GRPO,
    GSPO,
    PPO,
    SFT,
    AlgorithmSpec,
    FlowAWM,
    FlowCRD,
    FlowDGPO,
    FlowDistill,
    FlowDMD2,
    FlowDPO,
    FlowDPPO,
    FlowGRPO,
    FlowGRPOGuard,
    FlowNFT,
    FlowOnlineDPO,
    FlowReferred,
    FlowSFT,
    FlowTDM,
    FlowTDMR1,
    Repeated,
)
from areno_fn.steps.joins import Stage
from areno_fn.steps.recipes.algorithm import (
    ACTOR,
    CRITIC,
    REFERENCE,
    SHELVES,
    Algorithm,
    Losses,
    Materials,
    Teaching,
    actor,
    critic,
)
from areno_fn.steps.recipes.flow_coupled import flow_dppo, flow_grpo, flow_grpo_guard
from areno_fn.steps.recipes.flow_distill import flow_distill
from areno_fn.steps.recipes.flow_match import flow_dmd2, flow_tdm, flow_tdm_r1
from areno_fn.steps.recipes.flow_noised import flow_awm, flow_crd, flow_dgpo, flow_nft, flow_online_dpo
from areno_fn.steps.recipes.flow_supervised import flow_dpo, flow_sft
from areno_fn.steps.recipes.flow_taught import FAKE, SURROGATE, TEACHER
from areno_fn.steps.recipes.ppo import ppo
from areno_fn.steps.recipes.sampled import grpo, gspo
from areno_fn.steps.recipes.supervised import dpo, sft
from areno_fn.steps.variants import refreshed

__all__ = [
    "ACTOR",
    "CRITIC",
    "FAKE",
    "RECIPES",
    "REFERENCE",
    "SHELVES",
    "SURROGATE",
    "TEACHER",
    "Algorithm",
    "Losses",
    "Materials",
    "Recipe",
    "Teaching",
    "actor",
    "build",
    "critic",
    "dpo",
    "flow_awm",
    "flow_crd",
    "flow_dgpo",
    "flow_distill",
    "flow_dmd2",
    "flow_dpo",
    "flow_dppo",
    "flow_grpo",
    "flow_grpo_guard",
    "flow_nft",
    "flow_online_dpo",
    "flow_sft",
    "flow_tdm",
    "flow_tdm_r1",
    "grpo",
    "gspo",
    "ppo",
    "sft",
]


@attrs.frozen(kw_only=True)
class Recipe:
    """An algorithm's builder and the contract it was written for."""

    execution: ExecutionContract
    build: Callable[[Any, Materials, Mapping[str, Stage]], Algorithm]


RECIPES: dict[type[AlgorithmSpec], Recipe] = {
    SFT: Recipe(execution=DATASET_NONE, build=sft),
    DPO: Recipe(execution=DATASET_NONE, build=dpo),
    GRPO: Recipe(execution=GENERATION_REWARD, build=grpo),
    GSPO: Recipe(execution=GENERATION_REWARD, build=gspo),
    PPO: Recipe(execution=GENERATION_REWARD, build=ppo),
    FlowSFT: Recipe(execution=DATASET_NONE, build=flow_sft),
    FlowDPO: Recipe(execution=DATASET_NONE, build=flow_dpo),
    FlowGRPO: Recipe(execution=GENERATION_REWARD, build=flow_grpo),
    FlowGRPOGuard: Recipe(execution=GENERATION_REWARD, build=flow_grpo_guard),
    FlowDPPO: Recipe(execution=GENERATION_REWARD, build=flow_dppo),
    FlowNFT: Recipe(execution=GENERATION_REWARD, build=flow_nft),
    FlowAWM: Recipe(execution=GENERATION_REWARD, build=flow_awm),
    FlowDGPO: Recipe(execution=GENERATION_REWARD, build=flow_dgpo),
    FlowCRD: Recipe(execution=GENERATION_REWARD, build=flow_crd),
    FlowOnlineDPO: Recipe(execution=GENERATION_REWARD, build=flow_online_dpo),
    FlowDMD2: Recipe(execution=GENERATION_NONE, build=flow_dmd2),
    FlowTDM: Recipe(execution=GENERATION_NONE, build=flow_tdm),
    FlowTDMR1: Recipe(execution=GENERATION_REWARD, build=flow_tdm_r1),
    FlowDistill: Recipe(execution=GENERATION_NONE, build=flow_distill),
}
"""The only registry of algorithms. A specification's `execution` and its recipe's must be one constant."""

for _spec, _recipe in RECIPES.items():
    if _spec.execution is not _recipe.execution:
        raise TypeError(
            f"{_spec.__name__} declares {_spec.execution}, but its recipe was written for {_recipe.execution}"
        )


def build(spec: AlgorithmSpec, materials: Materials, loss: Losses | None = None) -> Algorithm:
    """The algorithm of a specification, with its own losses or with those given: one for the actor, or some by role.

    Raises:
        JoinError: the loss does not take what the algorithm's score stage returns, or does not return `Sums`.
        SpecError: a loss is for a role that is not trained.
    """
    given = loss if isinstance(loss, Mapping) else {} if loss is None else {ACTOR: loss}
    for role in given:
        if role not in spec.roles:
            raise SpecError(
                f"a loss was given for {role!r}, but the roles that are trained are {', '.join(spec.roles)}"
            )
    algorithm = RECIPES[type(spec)].build(spec, materials, given)
    every = spec.reference_every if isinstance(spec, DPO | Repeated | FlowReferred) else 0
    if not every:
        return algorithm
    put = materials.shelves[REFERENCE].put
    return attrs.evolve(algorithm, step=refreshed(algorithm.step, every, put, role=ACTOR, name=REFERENCE))
