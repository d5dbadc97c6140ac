"""The forward process: clean latents and noise levels to noised samples that every model is asked about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from areno_fn import tree
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import DataError
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.flow_batch import Noised, Velocities
from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace, shown
from areno_fn.steps.flow.alive import counted_noised
from areno_fn.steps.flow.guidance import guided, require_policy
from areno_fn.steps.flow.latents import along
from areno_fn.steps.flow.noise import latent_noise
from areno_fn.steps.flow.sample import require_rows
from areno_fn.steps.flow.schedule import TIMESTEPS
from areno_fn.steps.flow.times import Grid, Times, sampled_times
from areno_fn.steps.reduce import wide

T = TypeVar("T")


@checked
def noised(
    clean: torch.Tensor,
    conditions: Conditions,
    ids: torch.Tensor,
    key: Key,
    times: Times | Grid,
    *,
    terms: int = 1,
    shared: torch.Tensor | None = None,
    one_noise: bool = False,
    weight: torch.Tensor | None = None,
    advantage: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    guidance: float = 1.0,
) -> tuple[Noised, ...]:
    """Noised samples: one batch a time term, each of all rows.

    Levels and noise are functions of (key, term, id), so that all models and both passes see the same.

    Args:
        clean: [B, *], x0.
        conditions: of every row.
        ids: int64 [B], the name of each sample.
        key: names the draws.
        times: the distribution of levels.
        terms: how many levels every sample is noised to.
        shared: int64 [B], rows with one number share level and noise (both of a pair, all of a group); the ids
            when omitted.
        one_noise: a sample has the same noise in all terms.
        weight, advantage: float32 [B].
        groups: int64 [B], rows that are compared with each other.
        mask: bool [B, *].
        guidance: weight of classifier-free guidance while training.

    Raises:
        DataError: what is of every row has another number of rows than there are ids, or ids or the mask another type.
        RecordError: an argument is of another type.
    """
    if terms < 1:
        raise DataError(f"every sample is noised to at least one level, received terms={terms}")
    if ids.ndim != 1 or ids.is_floating_point():
        raise DataError(f"ids are a vector of whole numbers, the name of each row, received {shown(ids)}")
    if not clean.is_floating_point():
        raise DataError(
            f"clean latents are floating numbers, received {shown(clean)}; pictures are from -1 to 1, not to 255"
        )
    if mask is not None and mask.dtype != torch.bool:
        raise DataError(f"a mask is True where a latent counts, of type bool, received {shown(mask)}")
    of_rows = {
        "clean": clean,
        "conditions": conditions,
        "shared": shared,
        "weight": weight,
        "advantage": advantage,
        "groups": groups,
        "mask": mask,
    }
    require_rows({name: value for name, value in of_rows.items() if value is not None}, ids.shape[0])
    names = ids if shared is None else shared
    batches = []
    for term in range(terms):
        stream = key.fold(term)
        sigma = sampled_times(times, stream.fold("level"), names)
        noise = latent_noise((key if one_noise else stream).fold("noise"), names, tuple(clean.shape[1:]))
        batches.append(
            noised_to(
                clean,
                noise,
                sigma,
                conditions,
                weight=torch.ones_like(sigma) if weight is None else weight,
                advantage=advantage,
                groups=groups,
                mask=mask,
                guidance=guidance,
            )
        )
    return tuple(batches)


def noised_to(
    clean: torch.Tensor,
    noise: torch.Tensor,
    sigma: torch.Tensor,
    conditions: Conditions,
    *,
    weight: torch.Tensor,
    factor: torch.Tensor | None = None,
    advantage: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    guidance: float = 1.0,
) -> Noised:
    """Clean latents [B, *] at given levels [B] with given noise [B, *]; what the mask leaves out gets no noise."""
    clean, noise = wide(clean), wide(noise)
    if mask is not None:
        noise = torch.where(mask, noise, clean)
    share = along(sigma, clean)
    return Noised(
        state=(1 - share) * clean + share * noise,
        target=noise - clean,
        sigma=sigma,
        timestep=sigma * TIMESTEPS,
        conditions=conditions,
        weight=weight,
        factor=factor,
        advantage=advantage,
        groups=groups,
        mask=mask,
        guidance=guidance,
    )


def predict(policy: FlowPolicy) -> Callable[[Any, Noised], Velocities]:
    """The stage `(params, Noised) -> Velocities`: what the current parameters say.

    Raises:
        SpecError: it is no `FlowPolicy`.
    """
    require_policy(policy)

    def stage(params: Any, batch: Noised) -> Velocities:
        batch = counted_noised(batch)
        return Velocities(velocity=_velocity(policy, params, batch), batch=batch)

    return stage


def remember(policy: FlowPolicy, batch: Noised, **parameters: Any) -> Noised:
    """The batch with the velocities of frozen parameters, without a gradient.

    Args:
        policy: the model.
        batch: noised samples.
        parameters: by the field that is filled: `old`, `reference` or `average`.
    """
    shown = counted_noised(batch)
    with torch.no_grad():
        return replace(batch, **{name: _velocity(policy, params, shown) for name, params in parameters.items()})


def rows_of(batch: T, rows: torch.Tensor) -> T:
    """Some rows of a batch, a record all of whose tensors are of rows."""
    taken: T = tree.map(lambda x: x[rows], batch)
    return taken


def _velocity(policy: FlowPolicy, params: Any, batch: Noised) -> torch.Tensor:
    ask = guided(policy, batch.guidance)
    return wide(ask(params, batch.state, batch.timestep, batch.conditions))
