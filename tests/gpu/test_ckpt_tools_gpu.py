"""The tools on a CUDA device find what they find on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ckpt_toys import write_folder

from areno_fn.ckpt.tools.diff import difference
from areno_fn.ckpt.tools.pieces import PIECE
from areno_fn.ckpt.tools.source import open_source

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn)


def test_a_comparison_on_a_device_is_that_of_the_cpu(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    a = {f"w{i}": (torch.randn(PIECE + 7, generator=generator) * 50).to(dtype) for i, dtype in enumerate(DTYPES)}
    b = {name: tensor.clone() for name, tensor in a.items()}
    for tensor in b.values():
        tensor[3::1001] = tensor[2::1001][: tensor[3::1001].numel()]
    b["w0"][5], b["w1"][PIECE] = float("nan"), float("inf")
    sources = [open_source(write_folder(tmp_path / name, tensors)) for name, tensors in (("a", a), ("b", b))]
    cpu, cuda = difference(*sources), difference(*sources, device="cuda")
    assert cuda.unequal.keys() == cpu.unequal.keys() == a.keys()
    for name, one in cpu.tensors.items():
        other = cuda.tensors[name]
        assert (other.differing, other.odd, other.largest, other.numel) == (
            one.differing,
            one.odd,
            one.largest,
            one.numel,
        )
        assert (other.a.nan, other.a.inf, other.b.nan, other.b.inf) == (one.a.nan, one.a.inf, one.b.nan, one.b.inf)
        assert other.norm == pytest.approx(one.norm, rel=1e-12)
        assert other.a.norm == pytest.approx(one.a.norm, rel=1e-12)
