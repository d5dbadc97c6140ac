"""C1, C2: exactly three execution contracts exist, and an algorithm's specification and recipe share one."""

from __future__ import annotations

import itertools
import typing

import attrs
import pytest

from areno_fn.contracts import execution, spec
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.execution import (
    DATASET_NONE,
    EXECUTION_CONTRACTS,
    GENERATION_NONE,
    GENERATION_REWARD,
    Acquisition,
    CycleUnit,
    ExecutionContract,
    Feedback,
    LoaderKind,
)


def test_C1_exactly_three_contracts_can_be_built() -> None:
    built = []
    for acquisition, feedback in itertools.product(Acquisition, Feedback):
        try:
            built.append(ExecutionContract(acquisition=acquisition, feedback=feedback))
        except SpecError:
            assert (acquisition, feedback) == (Acquisition.DATASET, Feedback.RUNTIME_REWARD)
    assert set(built) == set(EXECUTION_CONTRACTS) and len(built) == len(EXECUTION_CONTRACTS) == 3


def test_C1_the_refusal_names_the_pair_and_the_legal_ones() -> None:
    with pytest.raises(SpecError) as caught:
        ExecutionContract(acquisition="dataset", feedback="runtime_reward")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "acquisition 'dataset' cannot be paired with feedback 'runtime_reward'; "
        "legal pairs are generation + runtime_reward, generation + none, dataset + none"
    )


@pytest.mark.parametrize(
    ("contract", "unit", "loader"),
    [
        (GENERATION_REWARD, CycleUnit.ROLLOUT_ITERATION, LoaderKind.GROUPED_ROLLOUT),
        (GENERATION_NONE, CycleUnit.ROLLOUT_ITERATION, LoaderKind.GROUPED_ROLLOUT),
        (DATASET_NONE, CycleUnit.DATA_EPOCH, LoaderKind.DISTRIBUTED_EPOCH),
    ],
)
def test_C1_the_acquisition_decides_cycle_and_loader(
    contract: ExecutionContract, unit: CycleUnit, loader: LoaderKind
) -> None:
    assert contract.cycle_unit is unit and contract.loader_kind is loader


def test_C1_cycle_and_loader_cannot_be_chosen() -> None:
    with pytest.raises(TypeError, match="cycle_unit"):
        ExecutionContract(acquisition="dataset", feedback="none", cycle_unit=CycleUnit.DATA_EPOCH)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        DATASET_NONE.cycle_unit = CycleUnit.ROLLOUT_ITERATION  # type: ignore[misc]


def test_C1_contracts_cannot_be_changed_afterwards() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        DATASET_NONE.feedback = Feedback.RUNTIME_REWARD  # type: ignore[misc]
    with pytest.raises(SpecError):
        attrs.evolve(DATASET_NONE, feedback="runtime_reward")


def test_C1_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match="'reward' is not a valid Feedback"):
        ExecutionContract(acquisition="generation", feedback="reward")  # type: ignore[arg-type]


def test_C2_every_algorithm_declares_one_of_the_three_constants() -> None:
    algorithms = typing.get_args(spec.AlgorithmSpec)
    assert algorithms
    for algorithm in algorithms:
        assert any(algorithm.execution is contract for contract in EXECUTION_CONTRACTS), algorithm.__name__


def test_C2_specification_and_recipe_point_at_the_same_constant() -> None:
    from areno_fn.steps.recipes import RECIPES

    assert set(RECIPES) == set(typing.get_args(spec.AlgorithmSpec))
    for algorithm, recipe in RECIPES.items():
        assert algorithm.execution is recipe.execution


def test_the_constants_are_the_public_list() -> None:
    assert EXECUTION_CONTRACTS == (execution.GENERATION_REWARD, execution.GENERATION_NONE, execution.DATASET_NONE)
