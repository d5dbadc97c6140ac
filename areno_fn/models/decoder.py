"""The dense decoder of the llama and qwen families: its configuration, its parameters, and how they start."""

from __future__ import annotations

import attrs
import torch

from areno_fn import random, tree
from areno_fn.contracts.adapter import Weight
from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import record
from areno_fn.models.rope import Rope

_BLOCK = 1 << 22  # elements drawn at once, which bounds the 64-bit intermediates
_MOST_WEIGHTS = 1 << 50  # the sizes of tensors are 64-bit numbers, and would overflow before memory does


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """All that decides the function, apart from the parameters. Hashable.

    Attributes:
        vocab_size: V.
        hidden_size: D.
        intermediate_size: I.
        num_layers: number of layers.
        num_heads: H, query heads.
        num_kv_heads: K, key and value heads; H is a multiple of it.
        head_dim: channels of a head, even.
        rms_norm_eps: added to the mean square in every normalisation.
        rope: rotary angles.
        tie_embeddings: the embedding is the output matrix as well.
        qkv_bias, o_bias, mlp_bias: which projections have a bias (`mlp_bias`: gate, up and down).
        qk_norm: queries and keys are normalised per head before they are rotated.
        max_positions: the longest sequence the model was made for.
        initializer_range: standard deviation of the initial weights.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: Rope = attrs.field(factory=Rope)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 2048
    initializer_range: float = 0.02

    def __attrs_post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        for name in (*sizes, "max_positions"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1, received {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for rotary pairs, received {self.head_dim}")
        heads = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        weights = self.hidden_size * (2 * self.vocab_size + self.num_layers * (heads + 3 * self.intermediate_size))
        if weights > _MOST_WEIGHTS:
            raise ModelError(f"these sizes make a model of about {weights:.1e} weights, which fits in no memory")


@record
class Layer:
    """Parameters of one layer. Matrices are [out, in], as `torch.nn.functional.linear` takes them, and may be adapted.

    Attributes:
        attn_norm: [D].
        qkv: [(H + 2 K) head_dim, D], rows in the order q, k, v.
        qkv_bias: [(H + 2 K) head_dim] or None.
        q_norm, k_norm: [head_dim] or None.
        o: [D, H head_dim].
        o_bias: [D] or None.
        mlp_norm: [D].
        gate_up: [2 I, D], rows in the order gate, up.
        gate_up_bias: [2 I] or None.
        down: [D, I].
        down_bias: [D] or None.
    """

    attn_norm: torch.Tensor
    qkv: Weight
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    o: Weight
    o_bias: torch.Tensor | None = None
    mlp_norm: torch.Tensor
    gate_up: Weight
    gate_up_bias: torch.Tensor | None = None
    down: Weight
    down_bias: torch.Tensor | None = None


@record
class Decoder:
    """Parameters of a whole model.

    Attributes:
        embed: [V, D].
        layers: one record a layer.
        norm: [D].
        head: [V, D], or None when the embedding serves as the output matrix: one leaf, used twice.
    """

    embed: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Weight | None = None


def shapes(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    """The parameters of `config` as meta tensors: structure, shapes and dtype, without storage."""
    return Decoder(
        embed=_meta(config.vocab_size, config.hidden_size, dtype=dtype),
        layers=tuple(_layer_shapes(config, dtype) for _ in range(config.num_layers)),
        norm=_meta(config.hidden_size, dtype=dtype),
        head=None if config.tie_embeddings else _meta(config.vocab_size, config.hidden_size, dtype=dtype),
    )


def _layer_shapes(config: DecoderConfig, dtype: torch.dtype) -> Layer:
    width, inner = config.hidden_size, config.intermediate_size
    rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return Layer(
        attn_norm=_meta(width, dtype=dtype),
        qkv=_meta(rows, width, dtype=dtype),
        qkv_bias=_meta(rows, dtype=dtype) if config.qkv_bias else None,
        q_norm=_meta(config.head_dim, dtype=dtype) if config.qk_norm else None,
        k_norm=_meta(config.head_dim, dtype=dtype) if config.qk_norm else None,
        o=_meta(width, config.num_heads * config.head_dim, dtype=dtype),
        o_bias=_meta(width, dtype=dtype) if config.o_bias else None,
        mlp_norm=_meta(width, dtype=dtype),
        gate_up=_meta(2 * inner, width, dtype=dtype),
        gate_up_bias=_meta(2 * inner, dtype=dtype) if config.mlp_bias else None,
        down=_meta(width, inner, dtype=dtype),
        down_bias=_meta(width, dtype=dtype) if config.mlp_bias else None,
    )


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def init(
    config: DecoderConfig, key: Key, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """Random parameters: matrices normal with deviation `initializer_range`, norms 1, biases 0.

    A number is a function of (key, path of the leaf, row, column): more layers, another dtype or another device
    change none of the numbers that were there.

    Args:
        config: the model.
        key: the random stream; it is folded, never advanced.
        dtype: of every leaf.
        device: where the leaves lie; on `meta` nothing is drawn.
    """
    device = torch.device(device)

    def start(path: str, leaf: torch.Tensor) -> torch.Tensor:
        if device.type == "meta":
            return leaf
        if leaf.ndim == 2:
            return _normal(key.fold(path), leaf, config.initializer_range, device)
        return torch.full(leaf.shape, 0.0 if path.endswith("_bias") else 1.0, dtype=dtype, device=device)

    return tree.map_with_path(start, shapes(config, dtype))


def _normal(key: Key, like: torch.Tensor, deviation: float, device: torch.device) -> torch.Tensor:
    rows, columns = like.shape
    out = torch.empty(like.shape, dtype=like.dtype, device=device)
    across = torch.arange(columns, device=device)
    step = max(1, _BLOCK // columns)
    for first in range(0, rows, step):
        down = torch.arange(first, min(first + step, rows), device=device)
        out[first : first + step] = random.normal(key, down[:, None], across) * deviation
    return out
