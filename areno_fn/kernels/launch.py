"""What the launches of Triton kernels share: tensors as rows, tile sizes, and the device to launch on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

ROUNDING = {"enable_fp_fusion": False}
"""Launch option: a product that is added is rounded first, as it is spelled and as the reference does it."""


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """[..., D] as [A, B, D]: a view wherever the strides allow one, as for the heads inside a fused projection."""
    return x.reshape(1, 1, -1) if x.ndim == 1 else x.reshape(-1, *x.shape[-2:])


def wide(x: torch.Tensor) -> tl.dtype:
    """The dtype in which sums and products over `x` are formed."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def tile(size: int, elements: int = 2048) -> tuple[int, int]:
    """(rows, columns) of a tile that spans a whole row of `size`, with about `elements` in all; powers of two."""
    columns = triton.next_power_of_2(size)
    return max(1, elements // columns), columns


def warps(elements: int) -> int:
    """Warps for a tile of that many elements: 16 elements a thread, between 1 and 16 warps."""
    return min(16, max(1, elements // 512))


def on_device_of(x: torch.Tensor) -> AbstractContextManager[None]:
    """Launches go to the current device, which need not be the one that the tensor lies on."""
    return torch.cuda.device_of(x) if x.is_cuda else nullcontext()
