"""Which implementation of a kernel runs: the device of its arguments decides, and nothing else."""

from __future__ import annotations

import torch

from areno_fn.contracts.errors import KernelError

BACKENDS = {"cpu": "reference", "cuda": "triton"}
"""The implementation for each type of device."""


def backend(kernel: str, *tensors: torch.Tensor) -> str:
    """The name of the implementation, `reference` or `triton`, for these arguments.

    Raises:
        KernelError: the tensors lie on several devices, or on one that the kernel has no implementation for.
    """
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise KernelError(f"{kernel}: all tensors must lie on one device, received {device} and {tensor.device}")
    if device.type not in BACKENDS:
        raise KernelError(f"{kernel} has no implementation for device {device}; it has {' and '.join(BACKENDS)}")
    return BACKENDS[device.type]


def require(condition: bool, kernel: str, wanted: str, *received: torch.Tensor) -> None:
    """Refuses arguments, showing the dtype and shape of what was received.

    Raises:
        KernelError: the condition is false.
    """
    if not condition:
        shown = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in received)
        raise KernelError(f"{kernel}: {wanted}, received {shown}")
