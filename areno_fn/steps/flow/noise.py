"""Noise of latents as a function of (key, sample id, step, element): never of the batch or of the order of calls."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from areno_fn import random
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.key import Key
from areno_fn.steps.flow.schedule import places


def latent_noise(
    key: Key, ids: torch.Tensor, shape: tuple[int, ...], step: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Standard normal latents [B, *]; rows with one id have the same.

    Args:
        key: the random stream.
        ids: int64 [B].
        shape: *, of one latent.
        step: which draw of the stream.
        dtype: of the numbers.
    """
    element = torch.arange(math.prod(shape), device=ids.device)
    place = torch.tensor(step, device=ids.device)
    return random.normal(key, ids[:, None], place, element[None], dtype=dtype).reshape(ids.shape[0], *shape)


@checked
def noisy_subset(key: Key, candidates: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` of the candidate steps, uniformly, sorted.

    Raises:
        SpecError: there are fewer.
    """
    if not 0 <= count <= len(candidates):
        raise SpecError(f"{count} noisy steps cannot be chosen among {len(candidates)}")
    return tuple(sorted(candidates[i] for i in random.permutation(key, len(candidates))[:count].tolist()))


@checked
def noisy_window(key: Key, candidates: Sequence[int], size: int) -> tuple[int, ...]:
    """`size` successive ones of the candidate steps, beginning anywhere with the same probability.

    Raises:
        SpecError: there are fewer.
    """
    if not 1 <= size <= len(candidates):
        raise SpecError(f"a window of {size} steps does not fit into {len(candidates)}")
    (first,) = noisy_subset(key, range(len(candidates) - size + 1), 1)
    return tuple(candidates[first : first + size])


@checked
def noise_levels(steps: int, noisy: Sequence[int] | None, level: float = 0.7) -> torch.Tensor:
    """Eta of every step, float32 [T]: `level` at the noisy ones and 0 elsewhere.

    Args:
        steps: T.
        noisy: places, negative ones from the end; None stands for all but the last, which ends at the data.
        level: eta, above 0 and, for CPS, at most 1.

    Raises:
        SpecError: there is no step, one does not exist, or the level is not above 0.
    """
    if steps < 1:
        raise SpecError(f"noise levels are those of at least one step, received steps={steps}")
    if not level > 0:
        raise SpecError(f"a noise level must be above 0, received {level}; name no noisy steps for the ODE")
    chosen = range(steps - 1) if noisy is None else places(noisy, steps)
    levels = torch.zeros(steps)
    levels[list(chosen)] = level
    return levels
