"""`ExecutionContract`: where an algorithm's data comes from and what judges it. Exactly three exist.

Imports no torch, so that a specification can be checked without it.
"""

from __future__ import annotations

from enum import StrEnum

import attrs

from areno_fn.contracts.errors import SpecError


class Acquisition(StrEnum):
    """Where the samples of a training step come from."""

    GENERATION = "generation"
    DATASET = "dataset"


class Feedback(StrEnum):
    """What judges the samples."""

    RUNTIME_REWARD = "runtime_reward"
    NONE = "none"


class CycleUnit(StrEnum):
    """The counter that one acquisition cycle advances."""

    ROLLOUT_ITERATION = "rollout_iteration"
    DATA_EPOCH = "data_epoch"


class LoaderKind(StrEnum):
    """How rows are drawn: prompts in groups of samples, or every row once an epoch."""

    GROUPED_ROLLOUT = "grouped_rollout"
    DISTRIBUTED_EPOCH = "distributed_epoch"


@attrs.frozen(kw_only=True)
class ExecutionContract:
    """A legal pair of acquisition and feedback; the cycle unit and the loader follow from it.

    Raises:
        SpecError: `dataset` with `runtime_reward`: stored rows are not judged at run time.
    """

    acquisition: Acquisition = attrs.field(converter=Acquisition)
    feedback: Feedback = attrs.field(converter=Feedback)

    def __attrs_post_init__(self) -> None:
        if self.acquisition is Acquisition.DATASET and self.feedback is Feedback.RUNTIME_REWARD:
            raise SpecError(
                "acquisition 'dataset' cannot be paired with feedback 'runtime_reward'; "
                "legal pairs are generation + runtime_reward, generation + none, dataset + none"
            )

    @property
    def cycle_unit(self) -> CycleUnit:
        """The counter that advances when a cycle's body has returned."""
        generation = self.acquisition is Acquisition.GENERATION
        return CycleUnit.ROLLOUT_ITERATION if generation else CycleUnit.DATA_EPOCH

    @property
    def loader_kind(self) -> LoaderKind:
        """The order in which rows are read."""
        generation = self.acquisition is Acquisition.GENERATION
        return LoaderKind.GROUPED_ROLLOUT if generation else LoaderKind.DISTRIBUTED_EPOCH


GENERATION_REWARD = ExecutionContract(acquisition="generation", feedback="runtime_reward")
GENERATION_NONE = ExecutionContract(acquisition="generation", feedback="none")
DATASET_NONE = ExecutionContract(acquisition="dataset", feedback="none")
EXECUTION_CONTRACTS = (GENERATION_REWARD, GENERATION_NONE, DATASET_NONE)
