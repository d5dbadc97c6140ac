"""Noise levels to train at, as functions of (key, ids): a sample keeps its level in any batch and on any rank."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from areno_fn import random
from areno_fn.contracts.calls import require_types
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.flow import Schedule
from areno_fn.contracts.key import GOLDEN, Key
from areno_fn.contracts.record import shown
from areno_fn.steps.flow.schedule import places, shifted, unshifted

HIGHEST = 1 - 2.0**-24


@attrs.frozen(kw_only=True)
class Times:
    """A distribution of noise levels.

    Attributes:
        kind: "uniform", or "logit_normal": sigma = 1 / (1 + e^-(mean + std z)) (SD3, arXiv 2403.03206).
        mean, std: of the logit.
        shift: applied to sigma, once; above 1 means more noise.
        low, high: the levels drawn lie between these, after the shift: the distribution is conditioned on it.
        spread: neighbouring ids get levels far from each other (a Kronecker sequence of quantiles with a random
            start), so that any run of ids covers the range evenly. Each level alone has the same distribution.

    Raises:
        SpecError: a name does not exist or a number is out of range.
    """

    kind: str = "uniform"
    mean: float = 0.0
    std: float = 1.0
    shift: float = 1.0
    low: float = 0.0
    high: float = 1.0
    spread: bool = True

    def __attrs_post_init__(self) -> None:
        require_types(self)
        if self.kind not in _QUANTILES:
            raise SpecError(f"times {self.kind!r} do not exist; choose one of {', '.join(_QUANTILES)}")
        if not (0 <= self.low < self.high <= 1 and self.std > 0 and self.shift > 0):
            raise SpecError(
                f"times need 0 <= low < high <= 1, std > 0 and shift > 0, received "
                f"low={self.low}, high={self.high}, std={self.std}, shift={self.shift}"
            )


@attrs.frozen(kw_only=True, eq=False)
class Grid:
    """The levels that a schedule asks its model at, each with the same probability.

    Attributes:
        schedule: the levels.
        steps: which of its steps; all when None, negative ones count from the end.
        spread: as in `Times`.

    Raises:
        SpecError: a step does not exist, or there is none.
    """

    schedule: Schedule
    steps: tuple[int, ...] | None = None
    spread: bool = True

    def __attrs_post_init__(self) -> None:
        require_types(self)
        if not places(self.steps, self.schedule.steps):
            raise SpecError("a grid of levels needs at least one step")


def grid_steps(steps: int, first: float, last: float) -> tuple[int, ...]:
    """The steps of a part of the denoising axis, of which 0 is pure noise and 1 is data: floor(T first) to below floor(T last).

    Raises:
        SpecError: the part is none, or no step lies in it.
    """
    if not 0 <= first < last <= 1 or int(steps * last) <= int(steps * first):
        raise SpecError(f"the part {first} to {last} of {steps} steps holds none; widen it within 0 to 1")
    return tuple(range(int(steps * first), int(steps * last)))


def share(first: float, last: float) -> tuple[float, float]:
    """(low, high) of a part of the denoising axis, of which 0 is pure noise and 1 is data."""
    return 1 - last, 1 - first


def sampled_times(times: Times | Grid, key: Key, ids: torch.Tensor) -> torch.Tensor:
    """Noise levels float32 [B] for ids int64 [B]: of `Times` strictly inside (0, 1), of a `Grid` its own."""
    if isinstance(times, Grid):
        candidates = torch.tensor(places(times.steps, times.schedule.steps), device=ids.device)
        return times.schedule.sigmas.to(ids.device)[sampled_steps(key, ids, candidates, spread=times.spread)]
    low, high = (torch.full(ids.shape, end, dtype=torch.float64, device=ids.device) for end in (times.low, times.high))
    return times_between(times, key, ids, low, high)


def times_between(times: Times, key: Key, ids: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Noise levels between bounds of their own [B], in the place of `times.low` and `times.high`, float32 [B]."""
    low, high = low.double(), high.double()
    quantile, distribution = _QUANTILES[times.kind]
    below, above = (distribution(unshifted(end, times.shift).clamp(0.0, 1.0), times) for end in (low, high))
    levels = shifted(quantile(below + _places(times, key, ids) * (above - below), times), times.shift)
    smallest = torch.finfo(torch.float32).tiny
    return torch.minimum(torch.maximum(levels, low), high).float().clamp(smallest, HIGHEST)


def sampled_steps(key: Key, ids: torch.Tensor, candidates: torch.Tensor, *, spread: bool = True) -> torch.Tensor:
    """One of the candidate steps for every id, each with the same probability.

    Args:
        key: the random stream.
        ids: int64 [B].
        candidates: int64 [n], places of a schedule.
        spread: as in `Times`.

    Returns:
        int64 [B].

    Raises:
        SpecError: there is no candidate.
    """
    if candidates.ndim != 1 or not candidates.numel():
        raise SpecError(f"steps are drawn among a vector of at least one candidate, received {shown(candidates)}")
    place = (_places(Times(spread=spread), key, ids) * candidates.shape[0]).long()
    return candidates[place.clamp(max=candidates.shape[0] - 1)]


def _places(times: Times, key: Key, ids: torch.Tensor) -> torch.Tensor:
    """A uniform number in (0, 1) for every id, float64 [B]."""
    if not times.spread:
        return random.uniform(key, ids, dtype=torch.float64)
    # 2^64 / golden ratio times the id, modulo 2^64, is the Kronecker sequence in integers
    word = random.words(key).to(ids.device) + ids * GOLDEN
    return (((word >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52


def _uniform(places: torch.Tensor, times: Times) -> torch.Tensor:
    del times
    return places


def _sigmoid_of_normal(places: torch.Tensor, times: Times) -> torch.Tensor:
    return torch.sigmoid(times.mean + times.std * torch.special.ndtri(places))


def _normal_of_logit(levels: torch.Tensor, times: Times) -> torch.Tensor:
    share: torch.Tensor = torch.special.ndtr((torch.logit(levels) - times.mean) / times.std)
    return share


Curve = Callable[[torch.Tensor, Times], torch.Tensor]

_QUANTILES: dict[str, tuple[Curve, Curve]] = {
    "uniform": (_uniform, _uniform),
    "logit_normal": (_sigmoid_of_normal, _normal_of_logit),
}
"""Kind -> the quantile function and the distribution function of the level before the shift."""
