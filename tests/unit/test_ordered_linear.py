"""Tiles of `ordered_linear`: which is taken, that none leaves an element out, and what is refused."""

from __future__ import annotations

import os

import pytest
import torch

from areno_fn.contracts.adapter import Adapted
from areno_fn.contracts.errors import KernelError
from areno_fn.kernels.backend import BACKENDS
from areno_fn.kernels.ordered_linear import ordered_linear
from areno_fn.testing import laws

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Small integers, whose products and sums are exact in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("shape", [(1, 8, 3), (70, 200, 130), (130, 64, 257), (129, 129, 64)])
def test_every_tile_makes_every_element(shape: tuple[int, int, int]) -> None:
    from areno_fn.kernels.ordered_linear import triton

    count, depth, columns = shape
    x, weight, bias = (
        whole_numbers(*size, seed=i) for i, size in enumerate(((count, depth), (columns, depth), (columns,)))
    )
    want = x.double() @ weight.double().t() + bias.double()
    for tile in (*(tile for _, tile in triton.TILES), triton.LARGE):
        out = torch.full((count, columns), torch.nan, dtype=torch.float32)
        assert torch.equal(triton.multiply(x, weight, bias, out, tile).double(), want), tile


def test_tiles_grow_with_the_result_and_all_have_the_rows_of_a_warp_group() -> None:
    from areno_fn.kernels.ordered_linear.triton import LARGE, TILES, tile_of

    assert all(tile.rows % 64 == 0 for tile in (*(tile for _, tile in TILES), LARGE))
    sizes = [tile.rows * tile.columns for tile in map(tile_of, (1, 64, 65, 512, 513, 16384))]
    assert sizes == sorted(sizes) and tile_of(16384) == LARGE != tile_of(1)


def test_rows_are_what_they_are_alone_also_through_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "cpu", "triton")
    source = torch.Generator().manual_seed(0)
    x, weight, a, b = (torch.randn(*s, generator=source).bfloat16() for s in ((90, 40), (21, 40), (3, 40), (21, 3)))
    adapted = Adapted(weight=weight, a=a.float(), b=b.float())
    laws.batch_invariant(lambda x: ordered_linear(x, adapted), x, sizes=(1, 7, 64))
    want = x.double() @ (weight.double() + b.double() @ a.double()).t()
    got = ordered_linear(x, adapted).double()
    assert float((got - want).norm()) <= 0.02 * float(want.norm())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KernelError, match=r"x must be floating \[..., D\], weight \[E, D\] of the same dtype"):
        ordered_linear(torch.ones(3, 4), torch.ones(5, 4).bfloat16())
    with pytest.raises(KernelError, match=r"received float32 \[3, 4\], float32 \[5, 3\]"):
        ordered_linear(torch.ones(3, 4), torch.ones(5, 3))
