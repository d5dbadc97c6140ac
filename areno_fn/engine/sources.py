"""Rules between data sets and what refers to them: names, weights, and the rewards that judge some sets only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from areno_fn.contracts.spec import DataSpec, RewardSpec, RunSpec


def source_problems(spec: RunSpec) -> Iterator[str]:
    """A sentence for every name, weight or reference that cannot be meant."""
    for phase in spec.phases:
        where = f"phases.{phase.name}"
        yield from _names(phase.data, f"{where}.data")
        yield from _weights(phase.data, f"{where}.data")
        yield from _judged(phase.data, phase.rewards, where)
    if spec.evaluation is not None:
        yield from _names(spec.evaluation.data, "evaluation.data")
        yield from _judged(spec.evaluation.data, spec.evaluation.rewards, "evaluation")
        for place, source in enumerate(spec.evaluation.data):
            if source.weight:
                yield f"evaluation.data.{place}.weight: an evaluation reads every row once, so no set has a weight; remove it"


def _names(data: Sequence[DataSpec], where: str) -> Iterator[str]:
    names = [source.name for source in data if source.name]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{where}: two data sets are named {name!r}; names must differ"
    places = {str(place) for place in range(len(data))}
    for place, source in enumerate(data):
        if source.name in places and source.name != str(place):
            yield f"{where}.{place}.name: {source.name!r} is the place of another data set in the list; choose a name"


def _weights(data: Sequence[DataSpec], where: str) -> Iterator[str]:
    without = [place for place, source in enumerate(data) if not source.weight]
    if without and len(without) < len(data):
        yield f"{where}.{without[0]}.weight: the other data sets have weights, so this one needs one above 0, or none of them any"


def _judged(data: Sequence[DataSpec], rewards: Sequence[RewardSpec], where: str) -> Iterator[str]:
    names = [source.name or str(place) for place, source in enumerate(data)]
    for place, reward in enumerate(rewards):
        for name in reward.data:
            if name not in names:
                yield (
                    f"{where}.rewards.{place}.data: there is no data set {name!r} in {where}.data; "
                    f"those there are called {', '.join(names)}"
                )
    known = {name for reward in rewards for name in reward.data}
    if rewards and all(reward.data for reward in rewards) and known <= set(names):
        for name in names:
            if name not in known:
                yield (
                    f"{where}.rewards: none of them judges the data set {name!r}, so all its samples would be worth 0; "
                    f"add it to the `data` of one, or leave that list empty"
                )
