"""The dense decoder with a cache: reading prompts, then one token a row. B rows, L prompt length, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.policy import Cache
from areno_fn.contracts.record import donate
from areno_fn.kernels.attention import cached_attention, equal_documents, key_places, packed_attention
from areno_fn.kernels.rms_norm import rms_norm
from areno_fn.models.decoder import Decoder, DecoderConfig
from areno_fn.models.decoder_layer import angles, at_hand, check_tokens, finish, logits, project


def prefill(
    params: Decoder, config: DecoderConfig, tokens: torch.Tensor, lengths: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, Cache]:
    """Reads right-padded prompts.

    Args:
        params: the parameters.
        config: the model they belong to.
        tokens: int64 [B, L]; what stands past a row's length is never read.
        lengths: int64 [B], from 1 to L.
        capacity: places of the cache, at least L; on the CPU it may get a few more (`key_places`).

    Returns:
        The logits [B, V] after each row's last token, and a cache that shares no storage with the arguments.

    Raises:
        ModelError: no tokens, shapes that do not fit, or a capacity below L; on the CPU also a length outside
            [1, L] or a token outside the vocabulary.
    """
    _check_prompts(tokens, lengths, capacity)
    batch, longest = tokens.shape
    places = torch.arange(longest, device=tokens.device)
    last = lengths[:, None] - 1
    tokens = tokens.gather(1, torch.minimum(places, last))  # past its end a row repeats its last token
    check_tokens(tokens, config.vocab_size, dims=2)
    layout = equal_documents(batch, longest)
    cos, sin = angles(config, places.repeat(batch))
    x = F.embedding(tokens.flatten(), params.embed)
    room = key_places(capacity, tokens.device)
    keys, values = [], []
    for layer in params.layers:
        q, k, v = project(config, layer, x, cos, sin)
        keys.append(_store(layout.pad(k), room))
        values.append(_store(layout.pad(v), room))
        x = finish(config, layer, x, packed_attention(q, k, v, layout, config.head_dim**-0.5))
    x = x.index_select(0, torch.arange(batch, device=x.device) * longest + last.flatten())
    cache = Cache(keys=tuple(keys), values=tuple(values), lengths=lengths.clone())
    return logits(params, rms_norm(x, params.norm, config.rms_norm_eps)), cache


def decode(params: Decoder, config: DecoderConfig, tokens: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, Cache]:
    """Reads one more token a row.

    Args:
        params: the parameters.
        config: the model they belong to.
        tokens: int64 [B].
        cache: what the rows have read so far, with a free place in every row; it is donated, and its storage is
            written to.

    Returns:
        Logits [B, V] after the token, and the cache to go on with.

    Raises:
        ModelError: the batch is not that of the cache; on the CPU also a full row or a token outside the vocabulary.
    """
    if tokens.shape != cache.lengths.shape:
        raise ModelError(
            f"decode: tokens must be [{cache.lengths.shape[0]}] like the cache, received {list(tokens.shape)}"
        )
    check_tokens(tokens, config.vocab_size, dims=1)
    span = _span(cache)
    return decode_in_place(params, config, tokens, donate(cache), span)


def decode_in_place(
    params: Decoder, config: DecoderConfig, tokens: torch.Tensor, cache: Cache, span: int
) -> tuple[torch.Tensor, Cache]:
    """`decode` for a caller that owns the cache's storage already, such as a compiled region.

    Args:
        params, config, tokens: as for `decode`.
        cache: written to; it is not poisoned, but must not be read again.
        span: places of the cache that are looked at, above every row's length.
    """
    lengths = cache.lengths + 1
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    cos, sin = angles(config, cache.lengths)
    x = F.embedding(tokens, params.embed)
    for layer, keys, values in zip(params.layers, cache.keys, cache.values, strict=True):
        q, k, v = project(config, layer, x, cos, sin)
        keys[rows, cache.lengths] = k
        values[rows, cache.lengths] = v
        out = cached_attention(q, keys[:, :span], values[:, :span], lengths, config.head_dim**-0.5)
        x = finish(config, layer, x, out)
    cache = Cache(keys=cache.keys, values=cache.values, lengths=lengths)
    return logits(params, rms_norm(x, params.norm, config.rms_norm_eps)), cache


def _store(x: torch.Tensor, capacity: int) -> torch.Tensor:
    """A buffer [B, capacity, K, head_dim] that starts with x [B, L, K, head_dim] and is finite everywhere."""
    buffer = x.new_zeros(x.shape[0], capacity, *x.shape[2:])
    buffer[:, : x.shape[1]] = x
    return buffer


def _span(cache: Cache) -> int:
    """How many places of the cache the next token looks at: those in use where that is known, else all."""
    capacity = cache.keys[0].shape[1]
    if not at_hand(cache.lengths):
        return capacity
    longest = int(cache.lengths.max())
    if longest >= capacity:
        raise ModelError(
            f"decode: a row of the cache is full, it has {capacity} places; prefill with a larger capacity"
        )
    return min(key_places(longest + 1, cache.lengths.device), capacity)


def _check_prompts(tokens: torch.Tensor, lengths: torch.Tensor, capacity: int) -> None:
    if tokens.ndim != 2 or not tokens.numel() or lengths.shape != tokens.shape[:1]:
        raise ModelError(
            "prefill: tokens must be [B, L] with at least one token and lengths [B], "
            f"received {list(tokens.shape)} and {list(lengths.shape)}"
        )
    if capacity < tokens.shape[1]:
        raise ModelError(f"prefill: capacity {capacity} is below the prompts' width {tokens.shape[1]}")
    if at_hand(lengths) and not (int(lengths.min()) >= 1 and int(lengths.max()) <= tokens.shape[1]):
        raise ModelError(f"prefill: lengths must lie in [1, {tokens.shape[1]}], received {lengths.tolist()}")
