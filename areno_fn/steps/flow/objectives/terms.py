"""What the losses of flow matching have in common: errors of velocities, one term a row, and the mean over rows."""

from __future__ import annotations

import torch

from areno_fn.contracts.actions import Sums
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.flow_batch import Noised, Velocities
from areno_fn.contracts.record import replace
from areno_fn.steps.flow.latents import along, over_latent
from areno_fn.steps.reduce import aggregate, masked, mean_of, wide

SMALLEST_SCALE = 1e-5


def seen(found: Velocities, who: str, *needed: str) -> Velocities:
    """The velocities with 0 in place of all that does not count, so that neither it nor its gradient can enter.

    Args:
        found: what a model says.
        who: the loss, for messages.
        needed: fields of the batch that it reads.

    Raises:
        RecordError: one of them is missing, or data carries a gradient.
    """
    batch = found.batch
    for name in needed:
        if getattr(batch, name) is None:
            raise RecordError(f"{who} needs Noised.{name}, which is None; fill it before the update")
    latents = {name: getattr(batch, name) for name in ("target", "old", "reference", "average")}
    rows = {name: getattr(batch, name) for name in ("factor", "advantage")}
    for name, value in (latents | rows).items():
        if value is not None and value.requires_grad:
            raise RecordError(
                f"Noised.{name} carries a gradient; it is data, never a function of the current parameters"
            )
    counted = {name: _counted(value, batch) for name, value in latents.items() if value is not None}
    counted |= {name: masked(value, batch.weight) for name, value in rows.items() if value is not None}
    return Velocities(velocity=_counted(found.velocity, batch), batch=replace(batch, **counted))


def given(value: torch.Tensor | None) -> torch.Tensor:
    """An optional field that `seen` was told to look for.

    Raises:
        RecordError: it is None.
    """
    if value is None:
        raise RecordError("a field of Noised that the loss reads is None; name it when calling seen()")
    return value


def squared_error(first: torch.Tensor, second: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The mean squared difference over the elements of each latent, [M]; masked elements are 0 in both already."""
    return over_latent((first - second).square(), mask)


def mean_deviation(first: torch.Tensor, second: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The mean absolute difference over the elements of each latent, in float64 and at least 1e-5, without gradient, [M]."""
    difference = (first.detach().double() - second.detach().double()).abs()
    return over_latent(difference, mask).clamp(min=SMALLEST_SCALE).to(first.dtype)


def mean_of_rows(values: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of one number a row, and the sum of the weights."""
    return aggregate(values, weight, torch.arange(values.shape[0], device=values.device), values.shape[0], "token_mean")


def summed(
    values: torch.Tensor,
    batch: Noised,
    *,
    penalties: tuple[tuple[float, torch.Tensor | None], ...] = (),
    stats: dict[str, torch.Tensor] | None = None,
    velocity: torch.Tensor,
) -> Sums:
    """The sums of one loss a row, and of penalties for distances from other velocities.

    Args:
        values: [M], with gradient.
        batch: after `seen`; its factor multiplies the values.
        penalties: (coefficient, velocities [M, *] that are kept near); a coefficient of 0 leaves one out.
        stats: more statistics.
        velocity: the current velocities, after `seen`.
    """
    if batch.factor is not None:
        values = values * batch.factor
    total, weight = mean_of_rows(values, batch.weight)
    for coefficient, other in penalties:
        if coefficient and other is not None:
            total = total + coefficient * mean_of_rows(squared_error(velocity, other, batch.mask), batch.weight)[0]
    found = {"flow/error": mean_of(squared_error(velocity, batch.target, batch.mask), batch.weight)}
    if batch.reference is not None:
        found["flow/kl"] = mean_of(squared_error(velocity, batch.reference, batch.mask), batch.weight)
    return Sums(total=total, weight=weight, stats=found | (stats or {}), peaks={})


def grouped_sum(values: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over the group of every row, [M], and the place of the row's group, int64 [M]."""
    _, member = torch.unique(groups, return_inverse=True)
    count = int(member.max()) + 1 if member.numel() else 0
    return values.new_zeros(count).index_add(0, member, values)[member], member


def bounded_advantage(advantage: torch.Tensor, largest: float) -> torch.Tensor:
    """Advantages clipped to +-largest."""
    return advantage.clamp(-largest, largest)


def _counted(values: torch.Tensor, batch: Noised) -> torch.Tensor:
    alive = along(batch.weight, values) != 0
    return torch.where(alive if batch.mask is None else alive & batch.mask, wide(values), 0.0)
