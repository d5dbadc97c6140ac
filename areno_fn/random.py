"""Draws as functions of (key, ids, positions, lanes): never of batch shape or call order.

Every function takes int64 coordinate tensors that broadcast against each other and returns one number per
broadcast element. A sequence keeps its numbers whatever batch it travels in, and a vocabulary split over
devices draws the same numbers as a whole one.
"""

from __future__ import annotations

import math

import torch

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.key import GOLDEN, Key, mix
from areno_fn.contracts.record import shown


def words(key: Key, *coordinates: torch.Tensor) -> torch.Tensor:
    """64 random bits per element of the broadcast coordinates, int64.

    Raises:
        RecordError: a coordinate is not a tensor of integers, or the key is none.
    """
    if not isinstance(key, Key):
        raise RecordError(f"draws are functions of a Key, as Key.of(0) makes one, received {shown(key)}")
    for coordinate in coordinates:
        if not isinstance(coordinate, torch.Tensor) or coordinate.is_floating_point():
            raise RecordError(f"coordinates of draws are tensors of integers, received {shown(coordinate)}")
    word = key.word().to(coordinates[0].device) if coordinates else key.word()
    for coordinate in coordinates:
        word = mix(word + (coordinate.to(torch.int64) + 1) * GOLDEN)
    return mix(word ^ GOLDEN)


def uniform(key: Key, *coordinates: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Uniform numbers strictly inside (0, 1): (k + 1/2) / 2^b with as many random bits b as `dtype` holds exactly."""
    return _unit(words(key, *coordinates), dtype)


def normal(key: Key, *coordinates: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers, by the inverse distribution function in float64."""
    number: torch.Tensor = torch.special.ndtri(_unit(words(key, *coordinates), torch.float64))
    return number.to(dtype)


def gumbel(key: Key, *coordinates: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard Gumbel numbers: `argmax(logp + gumbel)` is a draw from `exp(logp)`."""
    return (-torch.log(-torch.log(_unit(words(key, *coordinates), torch.float64)))).to(dtype)


def permutation(key: Key, size: int) -> torch.Tensor:
    """A uniform permutation of `range(size)`, int64 [size], a pure function of the key."""
    return torch.argsort(words(key, torch.arange(size)), stable=True)


def _unit(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bits = round(-math.log2(torch.finfo(dtype).eps))
    top = (word >> (64 - bits)) & ((1 << bits) - 1)
    return (top.to(dtype) + 0.5) * 2.0**-bits
