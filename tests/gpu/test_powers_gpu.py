"""The head whose logits are never written, on a device: every row against float64, and bits against the row alone."""

from __future__ import annotations

import pytest
import torch

from areno_fn.kernels.linear_token_loss import linear_token_loss, powers

pytestmark = pytest.mark.gpu

SCALE, SIZE = 0.7, 20011


def drawn(count: int, width: int = 1024) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head, targets and slopes; some targets are nearly certain, some nearly impossible."""
    source = torch.Generator("cuda").manual_seed(3)
    hidden = torch.randn(count, width, generator=source, device="cuda").bfloat16()
    weight = (torch.randn(SIZE, width, generator=source, device="cuda") * 3 / width**0.5).bfloat16()
    targets = torch.randint(SIZE, (count,), generator=source, device="cuda")
    hidden[1::5] = (weight[targets[1::5]].float() * 4).bfloat16()
    hidden[7::400] *= 60
    return hidden, weight, targets, torch.randn(count, generator=source, device="cuda")


@pytest.mark.parametrize("count", [1, 127, 1000])
def test_every_row_is_that_of_float64(count: int) -> None:
    hidden, weight, targets, slopes = drawn(count)
    assert powers.takes(hidden, weight)
    given = hidden.requires_grad_(), weight.requires_grad_()
    lever, logp, entropy = linear_token_loss(
        *given, targets, lambda first, logp, _: slopes[first : first + len(logp)], SCALE, chunk=256 * SIZE
    )
    got = torch.autograd.grad(lever, given)
    exact = tuple(x.detach().double().requires_grad_() for x in given)
    every = (exact[0] @ exact[1].t() * SCALE).log_softmax(-1)
    want_logp = every.gather(1, targets[:, None])[:, 0]
    want = torch.autograd.grad((want_logp * slopes.double()).sum(), exact)
    wanted = want_logp.detach()
    assert count < 1000 or (wanted.min() < -200 and wanted.max() > -1e-3)
    assert ((logp.double() - wanted).abs() / (1 + wanted.abs())).max() < 4e-5
    torch.testing.assert_close(entropy.double(), -(every.exp() * every).sum(-1).detach(), rtol=1e-4, atol=4e-4)
    rows = (got[0].double() - want[0]).norm(dim=1) / (want[0].norm(dim=1) + 1e-9)
    error = (got[1].double() - want[1]).norm() / want[1].norm()
    print(f"{count}: worst row {rows.max():.1e}, weight {error:.1e}")
    assert rows.max() < 8e-3 and error < 6e-3


def test_bits_do_not_depend_on_the_rows_beside() -> None:
    hidden, weight, targets, slopes = drawn(600)

    def run(here: slice, chunk: int) -> tuple[torch.Tensor, ...]:
        given = hidden[here].detach().requires_grad_()
        _, logp, entropy = linear_token_loss(
            given,
            weight,
            targets[here],
            lambda first, logp, _: slopes[here][first : first + len(logp)],
            chunk=chunk * SIZE,
        )
        return logp, entropy

    whole = run(slice(None), 600)
    again = run(slice(None), 600)
    parts = run(slice(None), 128)
    alone = run(slice(7, 8), 1)
    for x, y, z, one in zip(whole, again, parts, alone, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z) and torch.equal(x[7:8], one)
