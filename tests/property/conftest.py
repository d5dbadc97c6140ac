"""`mode`: the implementations of a kernel that tests can run on the CPU."""

from __future__ import annotations

import pytest
import torch

# numpy warns of the infinities that masked elements of a tile are meant to have
TRITON = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")]


@pytest.fixture(params=["reference", pytest.param("triton", marks=TRITON)])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation that runs on CPU tensors; memory that it does not write to holds what cannot be right."""
    from areno_fn.kernels.backend import BACKENDS  # this file is read before typeguard watches the library

    monkeypatch.setitem(BACKENDS, "cpu", request.param)
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: _poisoned(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: _poisoned(empty_like(*args, **kwargs)))
    return str(request.param)


def _poisoned(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.bool:
        return x
    return x.fill_(torch.nan) if x.is_floating_point() else x.fill_(torch.iinfo(x.dtype).max)
