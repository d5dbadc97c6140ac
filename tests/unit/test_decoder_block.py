"""A layer as one primitive against the layer as it is composed, in float64: values and every gradient."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.adapter import Adapted
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.kernels.attention import PackedLayout, fused, packed_attention, packed_layout
from areno_fn.models import decoder_block
from areno_fn.models.decoder import DecoderConfig, Layer, init
from areno_fn.models.decoder_block import Pair, block
from areno_fn.models.decoder_layer import angles, finish, project
from areno_fn.models.decoder_policy import DecoderPolicy

CONFIG = DecoderConfig(
    vocab_size=11, hidden_size=12, intermediate_size=20, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=6,
    qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, initializer_range=0.4,
)  # fmt: skip
SEGMENTS = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
POSITIONS = torch.tensor([0, 1, 2, 0, 0, 1, 2, 3])


@pytest.fixture(autouse=True)
def attention_by_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernels exist on a GPU alone; here their place is taken by autograd of the attention of the CPU."""

    def forward(q: Any, k: Any, v: Any, layout: PackedLayout, scale: float) -> tuple[torch.Tensor, ...]:
        return (packed_attention(q, k, v, layout, scale),)

    def backward(dout: Any, q: Any, k: Any, v: Any, kept: Any, layout: PackedLayout, scale: float) -> Any:
        assert kept[0].shape == dout.shape
        with torch.enable_grad():
            given = tuple(x.detach().requires_grad_() for x in (q, k, v))
            return torch.autograd.grad(packed_attention(*given, layout, scale), given, dout)

    monkeypatch.setattr(fused, "forward", forward)
    monkeypatch.setattr(fused, "backward", backward)


def layer_of(config: DecoderConfig, adapted: bool = False) -> Layer:
    made = init(config, Key.of(3), torch.float64).layers[0]
    source = torch.Generator().manual_seed(5)
    moved = tree.map(lambda x: x + 0.3 * torch.randn(x.shape, generator=source, dtype=x.dtype), made)
    if not adapted:
        return moved
    names = ("qkv", "o", "gate_up", "down")
    weights = {name: getattr(moved, name) for name in names}
    return replace(moved, **{
        name: Adapted(
            weight=w,
            a=torch.randn(3, w.shape[1], generator=source, dtype=w.dtype),
            b=torch.randn(w.shape[0], 3, generator=source, dtype=w.dtype),
        )
        for name, w in weights.items()
    })  # fmt: skip


def composed(config: DecoderConfig, layer: Layer, pair: Pair, layout: PackedLayout) -> torch.Tensor:
    cos, sin = angles(config, POSITIONS)
    x = pair.stream + pair.change
    q, k, v = project(config, layer, x, cos.double(), sin.double())
    return finish(config, layer, x, packed_attention(q, k, v, layout, config.head_dim**-0.5))


def loss_of(run: Any) -> Any:
    def loss(moving: Any) -> torch.Tensor:
        weight = torch.linspace(0.5, 2, 8 * 12, dtype=torch.float64).reshape(8, 12)
        return (run(*moving) * weight).sin().sum()

    return loss


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": False, "qkv_bias": False}, {"o_bias": False, "mlp_bias": False}])
def test_values_and_gradients_are_those_of_the_composition(remat: bool, adapted: bool, changes: Any) -> None:
    config = attrs.evolve(CONFIG, **changes)
    layer, layout = layer_of(config, adapted), packed_layout(SEGMENTS)
    source = torch.Generator().manual_seed(6)
    pair = Pair(*torch.randn(2, 8, 12, generator=source, dtype=torch.float64))
    cos, sin = (x.double() for x in angles(config, POSITIONS))

    def primitive(layer: Layer, pair: Pair) -> torch.Tensor:
        got = block(config, layer, pair, cos, sin, layout, remat=remat)
        return got.stream + got.change

    want = value_and_grad(loss_of(lambda layer, pair: composed(config, layer, pair, layout)))((layer, pair))
    got = value_and_grad(loss_of(primitive))((layer, pair))
    torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=1e-12)
    for (path, a), b in zip(tree.leaves_with_path(got[1]), tree.leaves(want[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda m, path=path: f"{path}: {m}")


def test_a_frozen_matrix_gets_no_gradient() -> None:
    layer, layout = layer_of(CONFIG, adapted=True), packed_layout(SEGMENTS)
    pair = Pair(*torch.ones(2, 8, 12, dtype=torch.float64))
    cos, sin = (x.double() for x in angles(CONFIG, POSITIONS))
    made: list[tuple[int, ...]] = []
    product = torch.Tensor.__matmul__

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made.append(tuple(product(a, b).shape))
        return product(a, b)

    def loss(own: torch.Tensor) -> torch.Tensor:
        some = replace(layer, down=replace(layer.down, a=own))
        got = block(CONFIG, some, pair, cos, sin, layout)
        return (got.stream + got.change).square().sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__matmul__", watched)
        gradient = value_and_grad(loss)(layer.down.a)[1]
    frozen = {tuple(getattr(layer, name).weight.shape) for name in ("qkv", "o", "gate_up", "down")}
    assert gradient.abs().sum() > 0 and made and not frozen & set(made)


def test_layers_that_are_computed_again_give_the_same_bits() -> None:
    config = attrs.evolve(CONFIG, num_layers=3)
    params = init(config, Key.of(1))
    tokens = torch.arange(8)

    def loss(remat: int) -> Any:
        policy = DecoderPolicy(config, remat=remat)
        return lambda params: policy.hidden(params, tokens, POSITIONS, SEGMENTS).sin().sum()

    kept = value_and_grad(loss(0))(params)
    for every in (1, 2, 3, 9):
        assert tree.equal(value_and_grad(loss(every))(params), kept)


@pytest.mark.parametrize("adapted", [False, True])
def test_leaves_are_called_what_they_are_called_elsewhere(adapted: bool) -> None:
    layer = layer_of(attrs.evolve(CONFIG, mlp_bias=False), adapted)
    assert decoder_block._paths(layer) == tuple(path for path, _ in tree.leaves_with_path(layer))
