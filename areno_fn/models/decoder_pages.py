"""The dense decoder with a cache of pages: reading texts, then one token a row. B rows, L text length, W pages a row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.pages import Pages
from areno_fn.kernels import add_rms_norm, gated_silu, norm_rotary
from areno_fn.kernels.attention import equal_documents
from areno_fn.kernels.attention.fused import takes
from areno_fn.kernels.consistency import ORDINARY, Primitives
from areno_fn.kernels.lanes import next_places
from areno_fn.kernels.norm_rotary_pages import norm_rotary_pages
from areno_fn.kernels.paged_attention import write_pages
from areno_fn.kernels.rms_norm import rms_norm
from areno_fn.models.decoder import Decoder, DecoderConfig, Layer
from areno_fn.models.decoder_layer import angles, at_hand, check_tokens, finish, logits, project, require_ordered


def blank(params: Decoder, config: DecoderConfig, count: int, size: int) -> Pages:
    """`count` pages of `size` tokens, zero, on the device and in the dtype of the embedding.

    In memory the tokens of a head lie together, so that a head of a page is read in one piece.
    """

    def part() -> torch.Tensor:
        return params.embed.new_zeros(count, config.num_kv_heads, size, config.head_dim).transpose(1, 2)

    layers = range(config.num_layers)
    return Pages(keys=tuple(part() for _ in layers), values=tuple(part() for _ in layers))


def page_bytes(params: Decoder, config: DecoderConfig, size: int) -> int:
    """Bytes of one page of `size` tokens."""
    return 2 * config.num_layers * size * config.num_kv_heads * config.head_dim * params.embed.dtype.itemsize


def read_into(
    params: Decoder,
    config: DecoderConfig,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    pages: Pages,
    stored: torch.Tensor | None = None,
    by: Primitives = ORDINARY,
) -> torch.Tensor:
    """Reads right-padded texts, from their beginning or from where they were left, and writes them to their pages.

    A part that goes on attends to a text's pages from their first one, with the very attention that reads it whole: its
    queries stand at their own places, and those of earlier places are zero and computed in vain. So a token has the
    bits it has in the whole text wherever rows do not depend on each other, and only what one layer attends with grows
    with the text.

    Args:
        params: the parameters.
        config: the model they belong to.
        tokens: int64 [B, L]; what stands past a row's length is never read.
        lengths: int64 [B], from 1 to L.
        table: int64 [B, W], with a page for every token, those of earlier parts included.
        pages: written to; read where texts go on.
        stored: int64 [B], tokens of each text that its pages hold from earlier parts; none where it is omitted.
        by: what multiplies and attends.

    Returns:
        The logits [B, V] after the last token of each.

    Raises:
        ModelError: no tokens or shapes that do not fit; on the CPU also a length outside [1, L], a token outside the
            vocabulary or a table that is too narrow.
    """
    _check_texts(tokens, lengths, table, pages, stored)
    batch, longest = tokens.shape
    columns = torch.arange(longest, device=tokens.device)
    last = lengths[:, None] - 1
    tokens = tokens.gather(1, torch.minimum(columns, last))  # past its end a row repeats its last token
    check_tokens(tokens, config.vocab_size, dims=2)
    inside = columns <= last
    positions = columns.expand(batch, longest) if stored is None else stored[:, None] + columns
    page = table.gather(1, (positions // pages.size).clamp_max(table.shape[1] - 1))
    places = torch.where(inside, page * pages.size + positions % pages.size, 0).flatten()
    layout, scale = equal_documents(batch, longest), config.head_dim**-0.5

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        write_pages(k, v, keys, values, places)
        if stored is None:
            return by.packed(q, k, v, layout, scale)
        return _going_on(q, keys, values, table, positions, inside, scale, by)

    ends = torch.arange(batch, device=tokens.device) * longest + last.flatten()
    hidden = _through(params, config, tokens.flatten(), positions.flatten(), pages, attend, by, ends)
    return logits(params, hidden, by)


def _going_on(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    inside: torch.Tensor,
    scale: float,
    by: Primitives,
) -> torch.Tensor:
    """What parts [B, L] of texts attend to: all places of their tables, of which a query sees those up to its own."""
    batch, room = table.shape[0], table.shape[1] * keys.shape[1]
    first = torch.arange(batch, device=q.device)[:, None] * room
    where = torch.where(inside, first + positions, batch * room).flatten()  # padding has a place of its own, behind all
    spread = q.new_zeros(batch * room + 1, *q.shape[1:]).index_copy_(0, where, q)[:-1]
    text_keys, text_values = (x[table].flatten(0, 2) for x in (keys, values))
    out = by.packed(spread, text_keys, text_values, equal_documents(batch, room), scale)
    return out.index_select(0, where.clamp_max(batch * room - 1))


def read_next(
    params: Decoder,
    config: DecoderConfig,
    tokens: torch.Tensor,
    stored: torch.Tensor,
    table: torch.Tensor,
    pages: Pages,
    longest: int | None = None,
    by: Primitives = ORDINARY,
) -> torch.Tensor:
    """Reads one more token a row.

    Args:
        params: the parameters.
        config: the model they belong to.
        tokens: int64 [B].
        stored: int64 [B], tokens of each row that its pages hold.
        table: int64 [B, W], with a page for the token that is read.
        pages: written to.
        longest: the largest of `stored` or more, where it is known.
        by: what multiplies and attends.

    Returns:
        The logits [B, V] after it.

    Raises:
        ModelError: shapes that do not fit; on the CPU also a row without room or a token outside the vocabulary.
    """
    check_tokens(tokens, config.vocab_size, dims=1)
    if stored.shape != tokens.shape or table.ndim != 2 or table.shape[0] != tokens.shape[0]:
        raise ModelError(
            f"read_next: stored must be [B] and table [B, W] for {tokens.shape[0]} rows, "
            f"received {list(stored.shape)} and {list(table.shape)}"
        )
    room = table.shape[1] * pages.size
    longest = room - 1 if longest is None else longest
    if longest >= room or (at_hand(stored) and int(stored.max()) > longest):
        raise ModelError(f"read_next: a row has no room for its next token, the table holds {room} places a row")
    places, lengths = next_places(stored, table, pages.size)

    def look(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return by.paged(q, keys, values, table, lengths, config.head_dim**-0.5, longest=longest + 1)

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        write_pages(k, v, keys, values, places)
        return look(q, keys, values)

    def mix(
        layer: Layer, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        q = norm_rotary_pages(
            qkv,
            layer.q_norm,
            layer.k_norm,
            cos,
            sin,
            config.num_heads,
            config.rms_norm_eps,
            keys,
            values,
            places,
        )
        return look(q, keys, values)

    # where bits must be those of training, the very kernel of training rotates
    once = mix if by is ORDINARY else None
    return logits(params, _through(params, config, tokens, stored, pages, attend, by, mix=once), by)


def _through(
    params: Decoder,
    config: DecoderConfig,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    pages: Pages,
    attend: Callable[..., torch.Tensor],
    by: Primitives,
    rows: torch.Tensor | None = None,
    mix: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Final hidden states of tokens [N], or of some rows of them, with the arithmetic that training has on the device.

    Args:
        attend: `(q, k, v, keys, values) -> [N, H, head_dim]`, with the pages of the layer.
        mix: `(layer, qkv, cos, sin, keys, values) -> [N, H, head_dim]`, where the projection is not taken apart first.
    """
    cos, sin = angles(config, positions)
    x = F.embedding(tokens, params.embed)
    layers = zip(params.layers, pages.keys, pages.values, strict=True)
    if not takes(x, config.head_dim):
        require_ordered(x, by)
        for layer, keys, values in layers:
            x = finish(config, layer, x, attend(*project(config, layer, x, cos, sin), keys, values))
        x = x if rows is None else x.index_select(0, rows)
        return rms_norm(x, params.norm, config.rms_norm_eps)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)  # as every layer of training rounds them
    change = torch.zeros_like(x)
    mixed = mix or _apart(config, attend)
    for layer, keys, values in layers:
        at_once = partial(mixed, layer, cos=cos, sin=sin, keys=keys, values=values)
        x, change = _fused(config, layer, x, change, at_once, by)
    if rows is not None:
        x, change = x.index_select(0, rows), change.index_select(0, rows)
    normal: torch.Tensor = add_rms_norm.forward(change, x, params.norm, config.rms_norm_eps)[1]
    return normal


def _apart(config: DecoderConfig, attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Queries, keys and values that are attended to one after the other."""

    def mix(
        layer: Layer, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        q, k = norm_rotary.forward(qkv, layer.q_norm, layer.k_norm, cos, sin, config.num_heads, config.rms_norm_eps)
        return attend(q, k, qkv[:, -config.num_kv_heads :], keys, values)

    return mix


def _fused(
    config: DecoderConfig,
    layer: Layer,
    x: torch.Tensor,
    change: torch.Tensor,
    mix: Callable[[torch.Tensor], torch.Tensor],
    by: Primitives,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer in the fewest passes; the stream before it and after it is the sum of two tensors [N, D]."""
    eps = config.rms_norm_eps
    x, normal = add_rms_norm.forward(change, x, layer.attn_norm, eps)
    qkv = by.linear(normal, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, config.head_dim))
    added = by.linear(mix(qkv).flatten(-2), layer.o, layer.o_bias)
    x, normal = add_rms_norm.forward(added, x, layer.mlp_norm, eps)
    gated = gated_silu.forward(by.linear(normal, layer.gate_up, layer.gate_up_bias))
    return x, by.linear(gated, layer.down, layer.down_bias)


def _check_texts(
    tokens: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, pages: Pages, stored: torch.Tensor | None
) -> None:
    fits = tokens.ndim == table.ndim == 2 and tokens.numel() > 0 and lengths.shape == tokens.shape[:1]
    if not fits or table.shape[0] != tokens.shape[0]:
        raise ModelError(
            "read_into: tokens must be [B, L] with at least one token, lengths [B] and table [B, W], "
            f"received {list(tokens.shape)}, {list(lengths.shape)} and {list(table.shape)}"
        )
    if stored is not None and stored.shape != lengths.shape:
        raise ModelError(f"read_into: stored must be [B] for {len(lengths)} rows, received {list(stored.shape)}")
    if not at_hand(lengths):
        return
    low, high = (int(x) for x in lengths.aminmax())
    if low < 1 or high > min(tokens.shape[1], table.shape[1] * pages.size):
        raise ModelError(
            f"read_into: lengths must lie in [1, {tokens.shape[1]}] and fit the {table.shape[1]} pages of {pages.size} "
            f"tokens a row has, received {lengths.tolist()}"
        )
    if stored is not None and (int(stored.min()) < 0 or int((stored + lengths).max()) > table.shape[1] * pages.size):
        raise ModelError(
            f"read_into: what is stored must not be negative and must fit the {table.shape[1]} pages of {pages.size} tokens a "
            f"row has with the part that is read, received {stored.tolist()} before {lengths.tolist()}"
        )
