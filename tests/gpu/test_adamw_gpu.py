"""AdamW in one pass on a CUDA device: against float64, against the composition, and without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areno_fn import tree
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.kernels.adamw import Factors, adamw_update
from areno_fn.steps.optimizers import adamw, fused

pytestmark = pytest.mark.gpu

SHAPES = [(), (1,), (3, 5), (4097,), (0,), (513, 1024)]
BETAS, EPS, RATE, CLIP = (0.9, 0.95), 1e-8, 3e-3, 0.25


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_updates_are_those_of_torch_in_float64(offset: int, low: torch.dtype, stored: torch.dtype) -> None:
    source = torch.Generator("cuda").manual_seed(0)

    def leaves(dtype: torch.dtype) -> list[torch.Tensor]:
        sizes = [torch.Size(shape).numel() for shape in SHAPES]
        whole = [torch.randn(n + offset, device="cuda", generator=source).to(dtype) for n in sizes]
        return [x[offset:].reshape(shape) for x, shape in zip(whole, SHAPES, strict=True)]

    begin, decay = leaves(torch.float32), [0.1, 0.0, 0.2, 0.0, 0.3, 0.1]
    exact = [x.double().clone().requires_grad_() for x in begin]
    groups = [{"params": [x], "weight_decay": d} for x, d in zip(exact, decay, strict=True)]
    peer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)
    state = [begin, [torch.zeros_like(x) for x in begin], [torch.zeros_like(x) for x in begin]]
    for step in (1, 2, 3):
        gradients = leaves(low)
        factors = Factors(*torch.tensor([CLIP, RATE, 1 - BETAS[0] ** step, 1 - BETAS[1] ** step], device="cuda"))
        new = adamw_update(gradients, *state, stored, decay, factors, BETAS, EPS)
        state = [new.master, new.mu, new.nu]
        for x, g in zip(exact, gradients, strict=True):
            x.grad = g.double() * CLIP
        peer.step()
        for got, kept, want in zip(new.master, new.stored, exact, strict=True):
            torch.testing.assert_close(got.double(), want.detach(), rtol=2e-6, atol=2e-7)
            assert torch.equal(kept, got.to(stored))


def apply(optimizer: Any, steps: int) -> Any:
    source = torch.Generator().manual_seed(2)
    params = {"matrix": torch.randn(33, 65, generator=source).bfloat16().cuda(), "norm": torch.ones(65).cuda()}
    state = optimizer.init(params)
    for step in range(steps):
        gradient = tree.map(lambda x, step=step: (x.float() * (step + 2)).sin(), params)
        params, state, stats = optimizer.apply(gradient, state, params)
    return params, state, stats


def test_one_pass_is_the_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AdamWSpec(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    got = apply(adamw(spec, 10), 4)
    monkeypatch.setattr(fused, "takes", lambda leaves, gradients: False)
    want = apply(adamw(spec, 10), 4)
    for (path, a), b in zip(tree.leaves_with_path(got), tree.leaves(want), strict=True):
        bound = 1e-2 if a.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(a, b, rtol=bound, atol=bound, msg=lambda m, path=path: f"{path}: {m}")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_the_host_never_waits() -> None:
    params = {"matrix": torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)}
    optimizer = adamw(AdamWSpec(lr=1e-2), 10)
    state = optimizer.init(params)
    gradient = {"matrix": torch.ones(64, 64, device="cuda")}
    params, state, _ = optimizer.apply(gradient, state, params)
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.apply(gradient, state, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
