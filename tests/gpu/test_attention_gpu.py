"""Packed attention on a CUDA device against its formula in float64, forward and backward, and a layer as one primitive."""

from __future__ import annotations

import attrs
import pytest
import torch

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.key import Key
from areno_fn.kernels.attention import fused, packed_attention, packed_layout
from areno_fn.kernels.law import Case
from areno_fn.models.decoder import Decoder, DecoderConfig, init
from areno_fn.models.decoder_forward import forward

pytestmark = pytest.mark.gpu

LENGTHS = {"even": (96, 96, 96), "short": (3, 3, 3), "ragged": (5, 1, 133, 2, 64), "one": (257,)}


def segments_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, scale: float) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)) * scale
    place = torch.arange(len(q), device=q.device)
    seen = (segments[:, None] == segments) & (place[:, None] >= place)
    return torch.einsum(
        "hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.repeat_interleave(group, 1)
    )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sliced", [False, True])
def test_attention_is_the_formula(lengths: tuple[int, ...], head_dim: int, dtype: torch.dtype, sliced: bool) -> None:
    segments, scale = segments_of(lengths), head_dim**-0.5
    count = len(segments)
    layout = packed_layout(segments, (len(lengths), max(lengths)))
    case = Case(sizes=(count,), dtype=dtype)
    whole = case.normal("qkv", count, 8, head_dim, device="cuda")
    parts = [x if sliced else x.contiguous() for x in whole.split((4, 2, 2), dim=1)]
    dout = case.normal("dout", count, 4, head_dim, device="cuda")
    got, pull = torch.func.vjp(lambda *x: packed_attention(*x, layout, scale), *parts)
    want, pull_want = torch.func.vjp(lambda *x: formula(*x, segments, scale), *(x.double() for x in parts))
    bound = 4 * torch.finfo(dtype).eps + 1e-6
    for a, b in zip((got, *pull(dout)), (want, *pull_want(dout.double())), strict=True):
        assert a.shape == b.shape and a.dtype == dtype
        assert (a - b).norm() < bound * b.norm()


@pytest.mark.parametrize("window", [0, 40])
def test_a_chip_of_before_has_flash(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """What is not compared on this chip is right all the same."""
    lengths = LENGTHS["ragged"]
    layout = packed_layout(segments_of(lengths), (len(lengths), max(lengths)))
    case = Case(sizes=(sum(lengths),), dtype=torch.bfloat16)
    parts = case.normal("qkv", sum(lengths), 8, 64, device="cuda").split((4, 2, 2), dim=1)
    dout = case.normal("dout", sum(lengths), 4, 64, device="cuda")
    assert fused.kernel_of(parts[0], layout, window) == "triton"
    own, pull_own = torch.func.vjp(lambda *x: packed_attention(*x, layout, 0.125, window=window), *parts)
    cotangents = pull_own(dout)
    monkeypatch.setattr(fused, "_is_late", lambda q: False)
    assert fused.kernel_of(parts[0], layout, window) == "flash"
    other, pull_other = torch.func.vjp(lambda *x: packed_attention(*x, layout, 0.125, window=window), *parts)
    for a, b in zip((own, *cotangents), (other, *pull_other(dout)), strict=True):
        assert (a.float() - b.float()).norm() < 1e-2 * b.float().norm()


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("window", [0, 1024])
def test_documents_of_several_lengths_have_the_same_bits_twice(size: int, window: int) -> None:
    """Nothing is added up by atomics."""
    lengths = (3000, 1, 1500, 600)
    layout = packed_layout(segments_of(lengths), (len(lengths), max(lengths)))
    case = Case(sizes=(sum(lengths),), dtype=torch.bfloat16)
    parts = case.normal("qkv", sum(lengths), 12, size, device="cuda").split((8, 2, 2), dim=1)
    dout = case.normal("dout", sum(lengths), 8, size, device="cuda")
    runs = []
    for _ in range(3):
        out, pull = torch.func.vjp(lambda *x: packed_attention(*x, layout, size**-0.5, window=window), *parts)
        runs.append((out, *pull(dout)))
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))


CONFIG = DecoderConfig(
    vocab_size=259, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32,
    qk_norm=True, qkv_bias=True, tie_embeddings=True, initializer_range=0.1,
)  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("qk_norm", [True, False])
def test_layers_in_half_precision_are_as_near_to_float64_as_rounding_explains(
    lengths: tuple[int, ...], qk_norm: bool
) -> None:
    config = attrs.evolve(CONFIG, qk_norm=qk_norm)
    segments = segments_of(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    tokens = (torch.arange(len(segments)) * 7 % config.vocab_size).cuda()
    params = init(config, Key.of(0), torch.bfloat16, "cuda")

    def loss(params: Decoder) -> torch.Tensor:
        logits = forward(params, config, tokens, positions, segments, bounds=(len(lengths), max(lengths)))
        return logits.double().log_softmax(-1)[:, 7].mean()

    value, gradient = value_and_grad(loss)(params)
    exact, exact_gradient = value_and_grad(loss)(tree.map(lambda x: x.double(), params))
    assert abs(float(value - exact)) < 2e-2 * abs(float(exact))
    for (path, a), b in zip(tree.leaves_with_path(gradient), tree.leaves(exact_gradient), strict=True):
        assert (a.double() - b).norm() < 6e-2 * b.norm(), path
