"""Memory on the host: the bytes of a tensor, and memory for tensors that live for a moment."""

from __future__ import annotations

import mmap

import torch

from areno_fn.contracts.layout import TensorSpec

_LARGE = 1 << 20


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    # a tensor of one element is contiguous with any stride, which `view` does not accept
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def passing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of any content that will soon be let go of. On the CPU a large one has pages of its own.

    Those go back to the system at once; the allocator of the C library keeps some for each thread, so that tensors
    that are made and dropped one after the other would take as much memory as several of them.
    """
    nbytes = TensorSpec(shape).numel * dtype.itemsize
    if device.type != "cpu" or nbytes < _LARGE:
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
