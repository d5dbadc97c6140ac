"""Memory on the host: the bytes of a tensor, and tensors that are cheap to fill."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from areno_fn.contracts.layout import TensorSpec

_LARGE = 1 << 22


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    # a tensor of one element is contiguous with any stride, which `view` does not accept
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of any content. A large one on the CPU is made of huge pages where the system has them.

    The first write into memory of small pages costs as much as the copy itself, because the system clears them one
    by one.
    """
    nbytes = TensorSpec(shape).numel * dtype.itemsize
    if device.type != "cpu" or nbytes < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages: then these are small ones
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
