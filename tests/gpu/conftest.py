"""Tests that need a CUDA device: `TRITON_INTERPRET=0 python -m pytest tests/gpu`."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def a_gpu_and_its_compiler() -> None:
    """Skips where there is no GPU, and where kernels would be interpreted instead of compiled for it."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs Triton's compiler, but TRITON_INTERPRET=1 asks for its interpreter")


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory from torch.empty and torch.empty_like holds NaN, also where autograd's own thread asks for it."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: _poisoned(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: _poisoned(empty_like(*args, **kwargs)))


def _poisoned(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(torch.nan) if x.is_floating_point() else x.fill_(torch.iinfo(x.dtype).max)
