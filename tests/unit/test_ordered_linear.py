"""Tiles of `ordered_linear`: which is taken, that none leaves an element out, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from areno_fn.contracts.adapter import Adapted
from areno_fn.contracts.errors import KernelError
from areno_fn.kernels.backend import BACKENDS
from areno_fn.kernels.ordered_linear import ordered_linear
from areno_fn.testing import laws

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.double() @ weight.double().t()).bfloat16()


def whole_numbers(*shape: int, seed: int, most: int = 4) -> torch.Tensor:
    """Small integers, whose products and sums are exact in any order."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("shape", [(1, 8, 8), (70, 200, 136), (130, 64, 264), (129, 136, 64)])
def test_every_tile_makes_every_element(shape: tuple[int, int, int]) -> None:
    from areno_fn.kernels.ordered_linear import triton

    count, depth, columns = shape
    x, weight, bias = (
        whole_numbers(*size, seed=i) for i, size in enumerate(((count, depth), (columns, depth), (columns,)))
    )
    for own in (bias, None):
        want = x.double() @ weight.double().t() + (0 if own is None else own.double())
        assert all(triton.even(matrix) for matrix in (x, weight))
        for write in (triton.described, triton.by_address):
            for tile in (*triton.SMALL, triton.LARGE, triton.BY_ADDRESS):
                out = torch.full((count, columns), torch.nan, dtype=torch.float32)
                assert torch.equal(write(x, weight, own, out, tile).double(), want), (write, tile)


@pytest.mark.parametrize("shape", [(5, 9, 7), (70, 200, 130), (9, 12, 16)])
def test_what_no_descriptor_stands_for_is_read_by_address(shape: tuple[int, int, int], taken: list[str]) -> None:
    from areno_fn.kernels.ordered_linear import triton

    count, depth, columns = shape
    x, weight = whole_numbers(count, depth, seed=0, most=1), whole_numbers(columns, depth, seed=1, most=1)
    assert torch.equal(triton.forward(x, weight, None), exact(x, weight))
    turned = whole_numbers(
        64, 16, seed=2
    ).t()  # rows that are not contiguous, rows that begin anywhere, and one row for all
    for given in (
        turned,
        whole_numbers(16, 72, seed=3, most=1)[:, 1:65],
        whole_numbers(1, 64, seed=4, most=1).expand(16, 64),
    ):
        own = whole_numbers(8, 64, seed=5, most=1)
        assert torch.equal(triton.forward(given, own, None), exact(given, own))
    assert taken == ["by_address"] * 4


def test_rows_far_apart_are_read_by_descriptor(taken: list[str]) -> None:
    from areno_fn.kernels.ordered_linear import triton

    x, weight = whole_numbers(16, 72, seed=3, most=1)[:, 8:72], whole_numbers(8, 64, seed=5, most=1)
    assert torch.equal(triton.forward(x, weight, None), exact(x, weight))
    assert taken == ["described"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that were taken."""
    from areno_fn.kernels.ordered_linear import triton

    found: list[str] = []

    def watched(name: str) -> Callable[..., torch.Tensor]:
        way = getattr(triton, name)
        return lambda *args: (found.append(name), way(*args))[1]

    for name in ("described", "by_address"):
        monkeypatch.setattr(triton, name, watched(name))
    return found


def test_tiles_grow_with_the_result_and_all_have_the_rows_of_a_warp_group() -> None:
    from areno_fn.kernels.ordered_linear.triton import BY_ADDRESS, LARGE, SMALL, tile_of

    assert all(tile.rows % 64 == 0 for tile in (*SMALL, LARGE, BY_ADDRESS))
    for columns in (1024, 151936):
        tiles = [tile_of(rows, columns) for rows in (1, 64, 256, 512, 2048, 16384)]
        sizes = [tile.rows * tile.columns for tile in tiles]
        assert sizes == sorted(sizes) and tiles[-1] == LARGE
    assert tile_of(1, 1024) == tile_of(256, 1024) == SMALL[-1] and tile_of(256, 151936) == LARGE


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
