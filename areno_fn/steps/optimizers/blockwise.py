"""One byte a number: a block of 256 shares a scale, and the byte says which of 256 levels below it a number has.

Levels are a constant ratio apart, so small numbers in a block of large ones keep their size. Rounding is by chance and right
on average: a moment that changes by a thousandth an update, less than any level's width, would otherwise stand still.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from areno_fn import random
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import record

BLOCK = 256
_SIGN = 128
_DECADES = {True: 6, False: 12}


@record
class Quantised:
    """A tensor in one byte a number.

    Attributes:
        codes: uint8, of the tensor's shape.
        scale: largest magnitude of every 256 numbers in a row, float32 (float64 for a float64 tensor) [blocks].
    """

    codes: torch.Tensor
    scale: torch.Tensor


def zeros(like: torch.Tensor) -> Quantised:
    """Zeros of the shape of a tensor."""
    count = -(-like.numel() // BLOCK)
    return Quantised(
        codes=torch.zeros_like(like, dtype=torch.uint8),
        scale=torch.zeros(count, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device),
    )


def levels(signed: bool, like: torch.Tensor) -> torch.Tensor:
    """What the codes stand for, relative to the scale, ascending: 0, then a constant ratio apart up to 1.

    Args:
        signed: 128 magnitudes, down to 1e-6, and a bit for the sign; else 256 levels, down to 1e-12.
        like: gives dtype and device.
    """
    count = (_SIGN if signed else 2 * _SIGN) - 1
    above = torch.logspace(-_DECADES[signed], 0, count, dtype=torch.float64, device=like.device)
    return F.pad(above, (1, 0)).to(like.dtype)


def quantise(values: torch.Tensor, key: Key, count: torch.Tensor, *, signed: bool) -> Quantised:
    """Rounds every number to one of the two levels around it, to the nearer one more often.

    The mean over keys is the number itself, but for unsigned numbers below the lowest level, which are rounded up to it:
    a second moment that is not 0 never becomes 0.

    Args:
        values: floating, of any shape; not negative unless `signed`.
        key: root of the choices, which are functions of (key, count, place).
        count: int64 [], the update.
    """
    blocks = F.pad(values.reshape(-1), (0, -values.numel() % BLOCK)).reshape(-1, BLOCK)
    scale = blocks.abs().amax(dim=1)
    level = levels(signed, values)
    relative = blocks.abs() / torch.where(scale == 0, 1, scale)[:, None]
    low = (torch.bucketize(relative, level, right=True) - 1).clamp(0, level.numel() - 2)
    share = (relative - level[low]) / (level[low + 1] - level[low])
    place = torch.arange(blocks.numel(), device=values.device).reshape(blocks.shape)
    codes = low + (random.uniform(key, count, place, dtype=values.dtype) < share)
    codes = codes + _SIGN * (blocks < 0) if signed else torch.where(blocks > 0, codes.clamp(min=1), codes)
    flat = codes.to(torch.uint8).reshape(-1)[: values.numel()]
    return Quantised(codes=flat.reshape(values.shape), scale=scale)


def dequantise(stored: Quantised, *, signed: bool) -> torch.Tensor:
    """The numbers that codes and scales stand for, in the dtype of the scales."""
    codes = stored.codes.reshape(-1).to(torch.int64)
    level = levels(signed, stored.scale)
    number = level[codes % _SIGN] * torch.where(codes < _SIGN, 1, -1).to(level.dtype) if signed else level[codes]
    scale = stored.scale.repeat_interleave(BLOCK)[: codes.numel()]
    return (number * scale).reshape(stored.codes.shape)
