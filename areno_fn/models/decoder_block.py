"""A layer of the dense decoder as one primitive with its own backward, for half precision on the GPU.

It is the arithmetic of `decoder_layer`, with a layer's output left as the two summands of the stream, so that every sum is
made together with the normalisation that follows it. What is cheap to make again is not kept: normalised rows and the
gated product. One primitive a layer also costs the host a few milliseconds less than one for each operation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
import torch
import torch.utils._pytree as pytree

from areno_fn.autodiff import custom_vjp
from areno_fn.contracts.adapter import Adapted
from areno_fn.kernels import add_rms_norm, gated_silu, norm_rotary
from areno_fn.kernels.attention import PackedLayout, fused
from areno_fn.kernels.consistency import ORDINARY, Primitives
from areno_fn.kernels.linear import linear_into_input, linear_into_weights
from areno_fn.kernels.rms_norm import rms_norm
from areno_fn.models.decoder import DecoderConfig, Layer


class Pair(NamedTuple):
    """The stream of hidden states [N, D] as a sum that has not been made yet."""

    stream: torch.Tensor
    change: torch.Tensor


@attrs.frozen
class _Structure:
    """What the leaves of a layer are, and where its documents are; no tree, so that transforms take it as one value.

    Attributes:
        spec: how they make up a `Layer`.
        paths: where each one stands in it.
        moving: the paths of those that may need a gradient; a frozen matrix is too large to make one in vain.
        layout: where the documents are.
        config: the model.
        by: what multiplies and attends in the forward pass.
    """

    spec: pytree.TreeSpec
    paths: tuple[str, ...]
    moving: frozenset[str]
    layout: PackedLayout
    config: DecoderConfig
    by: Primitives


def block(
    config: DecoderConfig,
    layer: Layer,
    pair: Pair,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: PackedLayout,
    *,
    remat: bool = False,
    by: Primitives = ORDINARY,
) -> Pair:
    """One layer: `project`, attention and `finish` of `decoder_layer`.

    Args:
        config: the model.
        layer: its parameters; matrices may be adapted.
        pair: the stream.
        cos, sin: float32 [N, head_dim / 2].
        layout: where the documents are.
        remat: keep the stream alone, and compute the layer again in the backward pass.
        by: what multiplies and attends; the backward pass is the same for all.
    """
    leaves, spec = pytree.tree_flatten(layer)
    paths = _paths(layer)
    moving = frozenset(path for path, leaf in zip(paths, leaves, strict=True) if leaf.requires_grad)
    run = _light if remat else _whole
    stream, change, *_ = run(_Structure(spec, paths, moving, layout, config, by), *pair, cos, sin, *leaves)
    return Pair(stream, change)


def _paths(layer: Layer) -> tuple[str, ...]:
    """The paths of the leaves in their order, as `tree.leaves_with_path` names them, in a tenth of the time."""
    present = [(name, getattr(layer, name)) for name in _FIELDS]
    parts = [
        [f"{name}.weight", f"{name}.a", f"{name}.b"] if isinstance(value, Adapted) else [name]
        for name, value in present
        if value is not None
    ]
    return tuple(path for part in parts for path in part)


_FIELDS = tuple(Layer.__annotations__)


class _Kept(NamedTuple):
    """What the backward of a layer needs beside its parameters. T = H + 2 K heads.

    Attributes:
        first: [N, D], the stream at the first normalisation.
        second: [N, D], the stream at the second one, which is the first summand of the result.
        qkv: [N, T, head_dim].
        q, k: rotated, [N, H, head_dim] and [N, K, head_dim].
        gate_up: [N, 2 I].
        attended: what the attention returned: the result [N, H, head_dim], and its statistics.
    """

    first: torch.Tensor
    second: torch.Tensor
    qkv: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    gate_up: torch.Tensor
    attended: tuple[torch.Tensor, ...]


def _forward(
    structure: _Structure,
    layer: Layer,
    first: torch.Tensor,
    normal: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> _Kept:
    """What is kept, of the stream and its normalised rows; `_result` is a product away."""
    config, layout, by = structure.config, structure.layout, structure.by
    eps = config.rms_norm_eps
    qkv = by.linear(normal, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, config.head_dim))
    q, k = norm_rotary.forward(qkv, *_head_norms(layer), cos, sin, config.num_heads, eps)
    attended = by.fused(q, k, qkv[:, -config.num_kv_heads :], layout, config.head_dim**-0.5)
    added = by.linear(attended[0].flatten(-2), layer.o, layer.o_bias)
    second, normal = add_rms_norm.forward(added, first, layer.mlp_norm, eps)
    gate_up = by.linear(normal, layer.gate_up, layer.gate_up_bias)
    return _Kept(first, second, qkv, q, k, gate_up, attended)


def _result(structure: _Structure, layer: Layer, kept: _Kept) -> torch.Tensor:
    """The second summand of the result, which no backward pass needs."""
    return structure.by.linear(gated_silu.forward(kept.gate_up), layer.down, layer.down_bias)


def _backward(
    structure: _Structure,
    layer: Layer,
    kept: _Kept,
    cotangents: tuple[Any, ...],
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The cotangents of both summands of the stream, which are one, and of the leaves."""
    dstream, dchange, *_ = cotangents
    config, layout = structure.config, structure.layout
    eps = config.rms_norm_eps
    found: dict[str, torch.Tensor] = {}
    # what is not needed any more is let go at once, which frees what was made again and not kept
    first, second, qkv, q, k, gate_up, attended = kept
    del kept, cotangents

    def weights(name: str, dy: torch.Tensor, x: torch.Tensor) -> None:
        paths = {"weight": name, "bias": f"{name}_bias", "a": f"{name}.a", "b": f"{name}.b"}
        if f"{name}.a" in structure.paths:
            paths["weight"] = f"{name}.weight"
        wanted = {kind for kind, path in paths.items() if path in structure.moving}
        for kind, value in linear_into_weights(dy, x, getattr(layer, name), _bias(layer, name), wanted).items():
            found[paths[kind]] = value

    dgate_up, gated = gated_silu.backward_with_value(linear_into_input(dchange, layer.down), gate_up)
    del gate_up
    weights("down", dchange, gated)
    del gated, dchange
    dnormal = linear_into_input(dgate_up, layer.gate_up)
    dsecond, found["mlp_norm"], normal = add_rms_norm.backward(dstream, dnormal, second, layer.mlp_norm, eps)
    del second, dnormal, dstream
    weights("gate_up", dgate_up, normal)
    del dgate_up, normal
    dout = linear_into_input(dsecond, layer.o).view_as(attended[0])
    weights("o", dsecond, attended[0].flatten(-2))
    v = qkv[:, -config.num_kv_heads :]
    dq, dk, dv = fused.backward(dout, q, k, v, attended, layout, config.head_dim**-0.5)
    del dout, q, k, v, attended
    dqkv, found["q_norm"], found["k_norm"] = norm_rotary.backward(dq, dk, dv, qkv, *_head_norms(layer), cos, sin, eps)
    del dq, dk, dv, qkv
    dqkv = dqkv.flatten(-2)
    dnormal = linear_into_input(dqkv, layer.qkv)
    dfirst, found["attn_norm"], normal = add_rms_norm.backward(dsecond, dnormal, first, layer.attn_norm, eps)
    del dnormal, dsecond
    weights("qkv", dqkv, normal)
    return dfirst, [found.get(path) for path in structure.paths]


def _head_norms(layer: Layer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Both weights of the norms of heads, or none."""
    return (None, None) if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)


def _bias(layer: Layer, name: str) -> torch.Tensor | None:
    bias: torch.Tensor | None = getattr(layer, f"{name}_bias")
    return bias


def _whole_forward(
    structure: _Structure,
    stream: torch.Tensor,
    change: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *leaves: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    layer = pytree.tree_unflatten(leaves, structure.spec)
    first, normal = add_rms_norm.forward(change, stream, layer.attn_norm, structure.config.rms_norm_eps)
    kept = _forward(structure, layer, first, normal, cos, sin)
    return kept.second, _result(structure, layer, kept), first, kept.qkv, kept.q, kept.k, kept.gate_up, *kept.attended


def _whole_pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    structure, _, _, cos, sin, *leaves = inputs
    second, _, first, qkv, q, k, gate_up, *attended = outputs
    kept = _Kept(first, second, qkv, q, k, gate_up, tuple(attended))
    layer = pytree.tree_unflatten(leaves, structure.spec)
    dpair, found = _backward(structure, layer, kept, cotangents, cos, sin)
    return None, dpair, dpair, None, None, *found


def _light_forward(*args: Any) -> tuple[torch.Tensor, ...]:
    return _whole_forward(*args)[:3]


def _light_pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    structure, _, _, cos, sin, *leaves = inputs
    first, eps = outputs[2], structure.config.rms_norm_eps
    layer = pytree.tree_unflatten(leaves, structure.spec)

    def kept() -> _Kept:
        return _forward(structure, layer, first, rms_norm(first, layer.attn_norm, eps), cos, sin)

    dpair, found = _backward(structure, layer, kept(), cotangents, cos, sin)
    return None, dpair, dpair, None, None, *found


_SUMMANDS, _STATISTICS = (1, 2), tuple(range(2, 12))

_whole = custom_vjp(_whole_forward, _whole_pull, constant_outputs=_STATISTICS, drop_inputs=_SUMMANDS, drop_outputs=(1,))
_light = custom_vjp(
    _light_forward, _light_pull, constant_outputs=_STATISTICS, drop_inputs=_SUMMANDS, drop_outputs=(0, 1)
)
