"""How many key places documents get on the CPU, so that a sum over keys has the same bits whatever its length.

torch's kernel adds up a row in vectors with a scalar tail, and takes keys in blocks of 512; the product of a block
with the values is cut by the BLAS every 192 keys, except that 193 to 383 are cut in half. Where zeros are added so
that every length is cut alike, a row attends with the same bits in training and in decoding. With another BLAS the
results may differ by roundings, as they would without this.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_VECTOR, _CUT, _BLOCK = 16, 192, 512


def key_places(length: int, device: torch.device) -> int:
    """The number of places, at least `length`, in which that many keys are laid out."""
    if device.type != "cpu":
        return length
    rest = length % _BLOCK
    if _CUT < rest < 2 * _CUT:
        return length - rest + 2 * _CUT
    return length + -length % _VECTOR


def padded(x: torch.Tensor, places: int) -> torch.Tensor:
    """`x` [..., S, D] as [..., places, D], zeros behind."""
    return x if x.shape[-2] == places else F.pad(x, (0, 0, 0, places - x.shape[-2]))
