"""The parts of the dense decoder that reading a stream and reading one more token have in common."""

from __future__ import annotations

import torch

from areno_fn.contracts.errors import ModelError
from areno_fn.kernels.consistency import ORDINARY, Primitives
from areno_fn.kernels.gated_silu import gated_silu
from areno_fn.kernels.linear import linear
from areno_fn.kernels.rms_norm import rms_norm
from areno_fn.kernels.rotary import rotary
from areno_fn.models.decoder import Decoder, DecoderConfig, Layer
from areno_fn.models.rope import inverse_frequencies


def project(
    config: DecoderConfig, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries [N, H, head_dim], rotated keys and values [N, K, head_dim] of hidden states [N, D]."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    normal = rms_norm(x, layer.attn_norm, config.rms_norm_eps)
    qkv = linear(normal, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, config.head_dim))
    if layer.q_norm is None or layer.k_norm is None:
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=-2)
        q, k = rotary(qk, cos, sin).split((heads, kv_heads), dim=-2)
        return q, k, v
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=-2)
    q = rotary(rms_norm(q, layer.q_norm, config.rms_norm_eps), cos, sin)
    k = rotary(rms_norm(k, layer.k_norm, config.rms_norm_eps), cos, sin)
    return q, k, v


def finish(config: DecoderConfig, layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """The rest of a layer: output projection [N, H, head_dim] -> [N, D], then the gated linear unit."""
    x = x + linear(attended.flatten(-2), layer.o, layer.o_bias)
    normal = rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
    gated = gated_silu(linear(normal, layer.gate_up, layer.gate_up_bias))
    return x + linear(gated, layer.down, layer.down_bias)


def angles(config: DecoderConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines float32 [N, head_dim / 2] of positions [N]."""
    frequencies, scale = inverse_frequencies(config.rope, config.head_dim, positions.device)
    turned = positions.unsqueeze(-1).to(torch.float32) * frequencies
    if scale == 1.0:
        return turned.cos(), turned.sin()
    return turned.cos() * scale, turned.sin() * scale


def logits(params: Decoder, hidden: torch.Tensor, by: Primitives = ORDINARY) -> torch.Tensor:
    """Logits [..., V] of final hidden states [..., D]."""
    return by.linear(hidden, params.embed if params.head is None else params.head)


def require_ordered(x: torch.Tensor, by: Primitives) -> None:
    """Refuses on a GPU what the fused path does not take where rollouts are to have the bits of training.

    Raises:
        ModelError: the primitives are not the ordinary ones.
    """
    if x.is_cuda and by is not ORDINARY:
        raise ModelError(
            "consistency 'bitwise' is for parameters in bfloat16 or float16, heads of at most 128 channels in eights, and "
            f"no traced graph, received {str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        )


def at_hand(tensor: torch.Tensor) -> bool:
    """True where a value can be read without waiting for a device or leaving a compiled graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def check_tokens(tokens: torch.Tensor, vocab_size: int, dims: int) -> None:
    """Refuses token tensors that are empty, of another dtype or dimension, or (on the CPU) outside the vocabulary."""
    if tokens.ndim != dims or tokens.dtype != torch.int64 or not tokens.numel():
        shown = f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
        raise ModelError(f"tokens must be int64 with {dims} dimension(s) and at least one token, received {shown}")
    if at_hand(tokens):
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= vocab_size:
            raise ModelError(f"token {low if low < 0 else high} is outside the vocabulary of {vocab_size}")
