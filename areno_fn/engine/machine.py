"""What this machine can do, found out by trying, and where it cannot, why not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attrs
import torch

from areno_fn.contracts.errors import ArenoError
from areno_fn.engine.smoke import SMOKE, largest_error
from areno_fn.kernels.backend import BACKENDS

REQUIRED = (
    "msgspec",
    "attrs",
    "safetensors",
    "tokenizers",
    "transformers",
    "numpy",
    "rich",
    "matplotlib",
    "tensorboard",
)
OPTIONAL = {"gguf": "GGUF files cannot be read", "hypothesis": "the tests cannot run", "pytest": "the tests cannot run"}
TOLERANCE = 1e-4  # of one kernel in float32 against itself in float64; what is broken is off by far more


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what it is.
        ok: True when it can be used, False when something that is needed fails, None when it is absent and may be.
        detail: what was found, or why not.
    """

    name: str
    ok: bool | None
    detail: str


def findings() -> Iterator[Finding]:
    """Looks at everything, the quick and general first."""
    yield Finding(name="Python", ok=True, detail=f"{platform.python_version()} on {platform.platform(terse=True)}")
    yield Finding(name="PyTorch", ok=True, detail=f"{torch.__version__}, {torch.get_num_threads()} threads")
    yield Finding(name="CPU", ok=True, detail=f"{_usable_cores()} of {os.cpu_count()} cores usable, {_memory()}")
    yield from _cuda()
    yield _triton()
    for device in _devices():
        yield from _device(device)
    yield from _packages()


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(_cuda_count()[0]))]


def _cuda_count() -> tuple[int, str]:
    """How many GPUs answer, and what torch said while it looked."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count, " ".join(str(said[0].message).split()) if said else ""


def _cuda() -> Iterator[Finding]:
    count, said = _cuda_count()
    if torch.version.cuda is None:
        yield Finding(name="CUDA", ok=None, detail="this PyTorch was built without CUDA; everything runs on the CPU")
    elif count == 0:
        yield Finding(
            name="CUDA", ok=None, detail=said or f"PyTorch is built for CUDA {torch.version.cuda}, but no GPU answers"
        )
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        detail = f"{torch.cuda.get_device_name(index)}, {_gib(free)} of {_gib(total)} free, capability {major}.{minor}"
        yield Finding(name=f"CUDA device {index}", ok=True, detail=detail)


def _triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        needed = _cuda_count()[0] > 0
        why = "not installed; kernels on the GPU need it" if needed else "not installed; the CPU does not need it"
        return Finding(name="Triton", ok=False if needed else None, detail=why)
    use = "used on the GPU" if _cuda_count()[0] else "without a GPU only its interpreter runs, for tests"
    return Finding(name="Triton", ok=True, detail=f"{importlib.metadata.version('triton')}, {use}")


def _device(device: torch.device) -> Iterator[Finding]:
    yield _try(f"bfloat16 on {device}", partial(_bfloat16, device))
    for kernel in SMOKE:
        name = f"{kernel} on {device} ({BACKENDS[device.type]})"
        yield _try(name, partial(_kernel, kernel, device))


def _try(name: str, look: Callable[[], tuple[bool, str]]) -> Finding:
    """What a trial found; its failure is a finding too, whatever the reason."""
    try:
        ok, detail = look()
    except (ArenoError, RuntimeError, ImportError, AttributeError, ValueError, TypeError, OSError) as error:
        lines = str(error).strip().splitlines() or [""]
        return Finding(name=name, ok=False, detail=f"{type(error).__name__}: {lines[0]}")
    return Finding(name=name, ok=ok, detail=detail)


def _bfloat16(device: torch.device) -> tuple[bool, str]:
    x = torch.linspace(-1, 1, 64 * 64, device=device).reshape(64, 64)
    exact = (x @ x).abs().max()
    error = float(((x.bfloat16() @ x.bfloat16()).float() - x @ x).abs().max() / exact)
    native = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return error < 0.05, "works" if native else "works, emulated and slow"


def _kernel(kernel: str, device: torch.device) -> tuple[bool, str]:
    error = largest_error(kernel, device)
    return error < TOLERANCE, f"forward and gradient within {error:.1e} of float64"


def _packages() -> Iterator[Finding]:
    for name in REQUIRED:
        version = _version(name)
        yield Finding(name=name, ok=version is not None, detail=version or f"not installed; `pip install {name}`")
    for name, loss in OPTIONAL.items():
        version = _version(name)
        yield Finding(name=name, ok=True if version else None, detail=version or f"not installed, so {loss}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else ""
    return f"{_gib(min(total, int(text)) if text.isdigit() else total)} memory"


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
