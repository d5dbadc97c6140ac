"""Draws as functions of (key, ids, positions, lanes): never of batch shape or call order.

Every function takes int64 coordinate tensors that broadcast against each other and returns one number per
broadcast element. A sequence keeps its numbers whatever batch it travels in, and a vocabulary split over
devices draws the same numbers as a whole one.
"""

from __future__ import annotations

import torch

from areno_fn.contracts.key import GOLDEN, Key, mix


def words(key: Key, *coordinates: torch.Tensor) -> torch.Tensor:
    """64 random bits per element of the broadcast coordinates, int64."""
    word = key.word().to(coordinates[0].device) if coordinates else key.word()
    for coordinate in coordinates:
        word = mix(word + (coordinate.to(torch.int64) + 1) * GOLDEN)
    return mix(word ^ GOLDEN)


def uniform(key: Key, *coordinates: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Uniform numbers strictly inside (0, 1)."""
    return _unit(words(key, *coordinates)).to(dtype) if dtype == torch.float64 else _unit_single(words(key, *coordinates), dtype)


def normal(key: Key, *coordinates: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers, by the inverse distribution function in float64."""
    return torch.special.ndtri(_unit(words(key, *coordinates))).to(dtype)


def gumbel(key: Key, *coordinates: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard Gumbel numbers: `argmax(logp + gumbel)` is a draw from `exp(logp)`."""
    return -torch.log(-torch.log(_unit(words(key, *coordinates)))).to(dtype)


def permutation(key: Key, size: int) -> torch.Tensor:
    """A uniform permutation of `range(size)`, int64 [size], a pure function of the key."""
    return torch.argsort(words(key, torch.arange(size)), stable=True)


def _unit(word: torch.Tensor) -> torch.Tensor:
    """The top 52 bits as a float64 in the open unit interval: (k + 1/2) / 2^52."""
    return (((word >> 12) & ((1 << 52) - 1)).to(torch.float64) + 0.5) * 2.0**-52


def _unit_single(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """23 bits, so that (k + 1/2) / 2^23 is exact in float32 and neither 0 nor 1."""
    return ((((word >> 41) & ((1 << 23) - 1)).to(torch.float32) + 0.5) * 2.0**-23).to(dtype)
