"""What the algorithms of flow models do with a judged rollout before they update: compare its rows, and cut it up."""

from __future__ import annotations

import torch

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.flow_batch import JudgedTrajectory
from areno_fn.contracts.spec import FlowGrouped, FlowNoised, FlowOnlineDPO, FlowTDMR1, FlowWhole
from areno_fn.contracts.state import TrainState
from areno_fn.steps.advantages import Compare, compared
from areno_fn.steps.flow.objectives.preference import best_and_worst
from areno_fn.steps.mixed_advantages import mixed_advantages
from areno_fn.steps.recipes.sampled import updates_of
from areno_fn.steps.token.experience import minibatches


def advantages_of(
    spec: FlowGrouped | FlowTDMR1, batch: JudgedTrajectory, compare: Compare | None = None
) -> torch.Tensor:
    """How much better every row is than its group, float32 [B], at most `max_advantage` from 0.

    A function of one's own says it in the place of the algorithm. With `combine = "each"` that is asked of every reward,
    and the weighted sum is scaled over the batch (GDPO, arXiv 2601.05242).

    Raises:
        RecordError: rewards are to be compared one by one, but only their sum is known.
    """
    groups, each = batch.rollout.groups, batch.each
    if spec.combine == "sum":
        found = compared(compare, batch.rewards, groups, baseline=spec.baseline, scale=spec.scale)
    elif each is None:
        raise RecordError("combine = 'each' compares rewards one by one, but JudgedTrajectory.each is None; fill it")
    else:
        found = mixed_advantages(each.values, each.weights, groups, applies=each.applies)
    return found.clamp(-spec.max_advantage, spec.max_advantage)


def rows_of_updates(
    spec: FlowNoised, state: TrainState, groups: torch.Tensor, advantages: torch.Tensor
) -> list[torch.Tensor]:
    """The rows of every update: shuffled one by one, or whole groups at a time; of a preference the pairs, if there are any.

    Args:
        groups: int64 [B], and `advantages`, float32 [B], of what was drawn.
    """
    if isinstance(spec, FlowOnlineDPO):
        return _pairs(spec, state, groups, advantages)
    if not isinstance(spec, FlowWhole):
        return updates_of(spec, state, groups.shape[0])
    found, member = torch.unique(groups, return_inverse=True)
    rows = [(member == place).nonzero().flatten() for place in range(len(found))]
    return [torch.cat([rows[place] for place in some.tolist()]) for some in updates_of(spec, state, len(found))]


def _pairs(
    spec: FlowOnlineDPO, state: TrainState, groups: torch.Tensor, advantages: torch.Tensor
) -> list[torch.Tensor]:
    """Best and worst of every group, side by side; as many mini-batches as there are pairs for."""
    pairs = best_and_worst(advantages, groups).reshape(-1, 2).cpu()
    if not len(pairs):
        return []
    shuffle = state.key.fold("minibatches").fold(state.counters.rollout_iteration)
    cut = [minibatches(len(pairs), min(spec.minibatches, len(pairs)), shuffle.fold(i)) for i in range(spec.epochs)]
    return [pairs[some].flatten() for epoch in cut for some in epoch]


def parts(units: torch.Tensor, most: int) -> list[torch.Tensor]:
    """The places of micro-batches of at most `most` rows each (0: of all), in which no unit is torn apart.

    Args:
        units: int64 [M], rows that stand together and have one number stay together; a unit that is larger is one part.
        most: rows.
    """
    whole = torch.arange(units.shape[0], device=units.device)
    if not most or units.shape[0] <= most:
        return [whole]
    _, lengths = torch.unique_consecutive(units, return_counts=True)
    sizes = [0]
    for length in lengths.tolist():
        if sizes[-1] and sizes[-1] + length > most:
            sizes.append(0)
        sizes[-1] += length
    return list(torch.split(whole, sizes))
