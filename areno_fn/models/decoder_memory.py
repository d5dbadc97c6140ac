"""What the gradient of a dense decoder keeps and needs on a GPU in half precision, moment by moment.

It is the account of `decoder_forward` and `decoder_block`: what autograd saves, what a layer makes in its backward pass and
when it lets go of it. N tokens, D width, I inner width, H query heads and K key heads of `head_dim`, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import torch
import torch.utils._pytree as pytree

from areno_fn.contracts.footprint import Footprint
from areno_fn.models.decoder import DecoderConfig, Layer, shapes
from areno_fn.models.decoder_forward import is_again

_LSE = 4
"""Bytes of the logarithm of a head's sum, which attention keeps for every token."""
_SEGMENT = 10
"""Tokens that the backward of the embedding adds up in one float32 row, as torch does it."""


@attrs.frozen(kw_only=True)
class Work:
    """One micro-batch.

    Attributes:
        config: the model.
        tokens: N.
        decisions: M, tokens whose logits are made.
        remat: every which layer is computed again; 0 for none.
        dtype: of parameters and hidden states.
        head: bytes that the head needs, its gradients among them.
    """

    config: DecoderConfig
    tokens: int
    decisions: int
    remat: int
    dtype: torch.dtype
    head: int

    def rows(self, *widths: int) -> int:
        """Bytes of matrices with a row a token."""
        return self.tokens * sum(widths) * self.dtype.itemsize


def kept(work: Work, layer: int) -> int:
    """Bytes that one layer keeps from its forward to its backward pass: its input, or all that is dear to make again."""
    config = work.config
    first = work.rows(config.hidden_size)
    return first if is_again(layer, work.remat) else first + _made(work)


def moments(work: Work) -> Iterator[Footprint]:
    """The moments of forward and backward pass at which memory may be at its largest; parameters are not counted."""
    config, sizes = work.config, _gradients(work)
    below = [kept(work, layer) for layer in range(config.num_layers)]
    angles = work.rows(config.head_dim)
    done = sizes["head"] + sizes["norm"]
    last = work.rows(2 * config.hidden_size) + work.decisions * config.hidden_size * work.dtype.itemsize
    yield Footprint(
        moment="at the head",
        parts={"kept": sum(below) + angles + last, "head": work.head},
    )
    for layer in reversed(range(config.num_layers)):
        again = is_again(layer, work.remat)
        for gradients, made, used in _layer_moments(work, sizes):
            yield Footprint(
                moment=f"in the backward pass of layer {layer}",
                parts={
                    "kept": sum(below[: layer + 1]) + angles,
                    "gradients": done + gradients,
                    "layer": used + (made if again else 0),
                },
            )
        done += sizes["layer"]
    spread = (work.tokens // _SEGMENT + min(work.tokens, config.vocab_size)) * config.hidden_size * 4
    yield Footprint(
        moment="in the backward pass of the embedding",
        parts={"gradients": done + sizes["embed"], "embedding": work.rows(config.hidden_size) + spread},
    )


def _made(work: Work) -> int:
    """Bytes that a layer makes beside its input and is asked for again."""
    config = work.config
    heads, kv, size = config.num_heads, config.num_kv_heads, config.head_dim
    widths = (config.hidden_size, (heads + 2 * kv) * size, heads * size, kv * size, 2 * config.intermediate_size)
    return work.rows(*widths, heads * size) + work.tokens * heads * _LSE


def _layer_moments(work: Work, sizes: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    """Gradients that are there, what was made again and is still there, and what else is used, in a layer's backward pass."""
    config = work.config
    width, inner = config.hidden_size, config.intermediate_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    dqkv, lse = heads + 2 * kv, work.tokens * config.num_heads * _LSE
    yield 0, _made(work), work.rows(width, 4 * inner)
    yield sizes["down"], _made(work) - work.rows(2 * inner), work.rows(4 * width, 2 * inner)
    attention = work.rows(dqkv, heads, kv, heads) + lse
    spread = work.tokens * dqkv * 4 + lse  # what the kernel of attention sums up, in float32
    below = sizes["down"] + sizes["gate_up"] + sizes["o"]
    yield below, attention, work.rows(2 * width, 2 * heads, 2 * kv) + spread
    yield below, work.rows(dqkv), work.rows(2 * width, dqkv, dqkv)
    yield below + sizes["qkv"], 0, work.rows(5 * width, dqkv)


def _gradients(work: Work) -> dict[str, int]:
    """Bytes of gradients: of the matrices of a layer, of all of it, and of what is outside of layers."""
    config = work.config
    model = shapes(config, work.dtype)
    layer: Layer = model.layers[0]
    matrices = {name: pytree.tree_leaves(getattr(layer, name))[0].nbytes for name in ("qkv", "o", "gate_up", "down")}
    head = model.embed if model.head is None else model.head
    return {
        **matrices,
        "layer": sum(leaf.nbytes for leaf in pytree.tree_leaves(layer)),
        "norm": model.norm.nbytes,
        "embed": model.embed.nbytes,
        "head": pytree.tree_leaves(head)[0].nbytes,
    }
