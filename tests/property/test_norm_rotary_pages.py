"""`norm_rotary_pages` against the formula in float64: the reference here, and Triton in its interpreter."""

from __future__ import annotations

import pytest
import torch

from areno_fn.contracts.errors import KernelError
from areno_fn.kernels.norm_rotary_pages import norm_rotary_pages

EPS = 1e-6


def formula(x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads [N, h, D] over their root mean square, times the weight, and turned as pairs (i, i + D / 2), in float64."""
    x = x.double()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(cos.double(), sin.double())[:, None]
    return torch.cat((pairs.real, pairs.imag), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "shared", "size"), [(4, 2, 8), (3, 1, 12), (6, 4, 64)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_first", [False, True])
def test_queries_come_back_and_keys_and_values_lie_in_their_pages(
    mode: str, dtype: torch.dtype, heads: int, shared: int, size: int, normed: bool, head_first: bool
) -> None:
    source = torch.Generator().manual_seed(heads)
    count = 5

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source).to(dtype)

    qkv = normal(count, heads + 2 * shared, 2 * size)[..., :size]
    weights = [normal(size) if normed else None for _ in range(2)]
    angle = torch.randn(count, size // 2, generator=source)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    pages = [torch.full((4, shared, 3, size), 9.0, dtype=dtype).transpose(1, 2) for _ in range(2)]
    if not head_first:
        pages = [x.contiguous() for x in pages]
    places = torch.tensor([11, 3, 5, 0, 7])
    before = qkv.clone()
    q = norm_rotary_pages(qkv, *weights, cos, sin, heads, EPS, *pages, places)
    assert torch.equal(qkv, before) and q.is_contiguous()
    k, v = qkv[:, heads : heads + shared], qkv[:, heads + shared :]
    rounding = {"rtol": 0, "atol": 24 * torch.finfo(dtype).eps}
    torch.testing.assert_close(q.double(), formula(qkv[:, :heads], weights[0], cos, sin), **rounding)
    written_keys, written_values = (x.flatten(0, 1) for x in pages)
    torch.testing.assert_close(written_keys[places].double(), formula(k, weights[1], cos, sin), **rounding)
    assert torch.equal(written_values[places], v)
    for written in (written_keys, written_values):
        assert int((written == 9.0).flatten(1).all(1).sum()) == 12 - count


def test_what_does_not_fit_is_refused() -> None:
    qkv, angles, pages = torch.ones(2, 6, 8), torch.ones(2, 4), torch.ones(3, 4, 1, 8)
    places = torch.arange(2)
    for keys, where in ((pages[..., :4], places), (pages, places.int()), (pages.double(), places)):
        with pytest.raises(KernelError, match=r"norm_rotary_pages: qkv must be floating \[N, H \+ 2 K, head_dim\]"):
            norm_rotary_pages(qkv, None, None, angles, angles, 4, EPS, keys, keys, where)
