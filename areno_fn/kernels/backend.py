"""Which implementation of a kernel runs: the device of its arguments decides, and nothing else."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
        raise KernelError(
            f"{kernel} has no implementation for device {device}; it has one for {' and '.join(BACKENDS)}"
        )
    return BACKENDS[device.type]


@contextmanager
def interpreted() -> Iterator[None]:
    """A context in which `triton.py` computes on CPU tensors, in Triton's interpreter, in the place of the reference.

    Raises:
        KernelError: the interpreter is not switched on.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise KernelError(
            "on a CPU Triton kernels run in its interpreter alone, which is off; "
            "set TRITON_INTERPRET=1 in the environment before Python starts"
        )
    before = BACKENDS["cpu"]
    BACKENDS["cpu"] = "triton"
    try:
        with warnings.catch_warnings():  # of the infinities and NaN that masked elements of a tile may have
            warnings.filterwarnings("ignore", ".* encountered in", RuntimeWarning)
            yield
    finally:
        BACKENDS["cpu"] = before


def implementation(
    kernel: str,
    part: str,
    signature: str,
    reference: Callable[..., Any],
    like: Callable[..., Any],
    *,
    package: str = "",
) -> Callable[..., Any]:
    """One part of a kernel, its forward or its backward, on any device it is implemented for.

    On the GPU this is the function `part` of the kernel's `triton.py`, imported when it is first needed. While a graph
    is traced it is called through an operator of that name, so that the tracer sees one node with known outputs instead
    of pointers that do not exist yet.

    Args:
        kernel: its name, which no other kernel of the process has.
        part: name of the function in `triton.py`.
        signature: its signature in torch's schema language, such as `(Tensor x, float eps) -> Tensor`.
        reference: the same function on the CPU.
        like: the same function again, returning uninitialised results of the right shape, dtype and strides.
        package: what holds `triton.py`, for a kernel of your own `__package__`; else the folder of that name here.
    """
    home = package or f"areno_fn.kernels.{kernel}"

    def on_gpu(*args: Any) -> Any:
        return getattr(importlib.import_module(f"{home}.triton"), part)(*args)

    operator = torch.library.custom_op(f"areno_fn::{kernel}_{part}", on_gpu, mutates_args=(), schema=signature)
    operator.register_fake(like)

    def run(*args: Any) -> Any:
        if backend(kernel, *(x for x in args if isinstance(x, torch.Tensor))) == "reference":
            return reference(*args)
        return operator(*args) if torch.compiler.is_compiling() else on_gpu(*args)

    return run


def require(condition: bool, kernel: str, wanted: str, *received: torch.Tensor) -> None:
    """Refuses arguments, showing the dtype and shape of what was received.

    Raises:
        KernelError: the condition is false.
    """
    if not condition:
        shown = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in received)
        raise KernelError(f"{kernel}: {wanted}, received {shown}")
