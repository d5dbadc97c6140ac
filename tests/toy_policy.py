"""Small policies that implement `TokenPolicy` plainly, to test what is built on the protocol."""

from __future__ import annotations

import attrs
import torch

from areno_fn.contracts.policy import Cache
from areno_fn.contracts.record import record


@record
class BigramParams:
    """`table[i]` are the logits after token i; `head` turns hidden states into logits."""

    table: torch.Tensor
    head: torch.Tensor


@attrs.frozen
class Bigram:
    """The next token depends on the last one alone; a row's numbers do not depend on its batch, bit for bit."""

    vocab_size: int = 11
    max_positions: int = 64

    def init(self, seed: int = 0, *, dtype: torch.dtype = torch.float32) -> BigramParams:
        source = torch.Generator().manual_seed(seed)
        table = torch.randn(self.vocab_size, self.vocab_size, generator=source, dtype=torch.float64)
        return BigramParams(table=table.to(dtype), head=torch.ones((), dtype=dtype))

    def hidden(self, params, tokens, positions, segments, *, bounds=None):
        return params.table[tokens]

    def logits(self, params, hidden):
        return hidden * params.head

    def prefill(self, params, tokens, lengths, capacity):
        last = tokens.gather(1, lengths[:, None] - 1).squeeze(1)
        return self.logits(params, params.table[last]), Cache(keys=(), values=(), lengths=lengths)

    def decode(self, params, tokens, cache):
        return self.logits(params, params.table[tokens]), Cache(keys=(), values=(), lengths=cache.lengths + 1)


@record
class AttentionParams:
    embed: torch.Tensor
    place: torch.Tensor
    qkv: torch.Tensor
    head: torch.Tensor


@attrs.frozen
class Attention:
    """One causal attention layer with learned absolute positions, written with loops over rows or plain masks."""

    vocab_size: int = 23
    max_positions: int = 48
    width: int = 16

    def init(self, seed: int = 0) -> AttentionParams:
        source = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=source)

        return AttentionParams(
            embed=normal(self.vocab_size, self.width) / 2,
            place=normal(self.max_positions, self.width) / 2,
            qkv=normal(self.width, 3 * self.width) / self.width**0.5,
            head=normal(self.width, self.vocab_size) / self.width**0.5,
        )

    def hidden(self, params, tokens, positions, segments, *, bounds=None):
        x = params.embed[tokens] + params.place[positions]
        q, k, v = (x @ params.qkv).chunk(3, -1)
        order = torch.arange(tokens.shape[0])
        seen = (segments[:, None] == segments[None, :]) & (order[None, :] <= order[:, None])
        scores = (q @ k.T / self.width**0.5).masked_fill(~seen, -torch.inf)
        return x + scores.softmax(-1) @ v

    def logits(self, params, hidden):
        return hidden @ params.head

    def prefill(self, params, tokens, lengths, capacity):
        rows, size = tokens.shape
        keys = torch.zeros(rows, capacity, 1, self.width)
        cache = Cache(keys=(keys,), values=(keys.clone(),), lengths=torch.zeros_like(lengths))
        logits = torch.zeros(rows, self.vocab_size)
        for column in range(size):
            here = column < lengths
            answer, cache = self._read(params, tokens[:, column], cache, here)
            logits = torch.where((column == lengths - 1)[:, None], answer, logits)
        return logits, cache

    def decode(self, params, tokens, cache):
        return self._read(params, tokens, cache, torch.ones_like(tokens, dtype=torch.bool))

    def _read(self, params, tokens, cache, here):
        """One more token in the rows where `here`; the cache passed in is overwritten, as its donation allows."""
        (keys,), (values,) = cache.keys, cache.values
        x = params.embed[tokens.where(here, 0)] + params.place[cache.lengths.clamp_max(self.max_positions - 1)]
        q, k, v = (x @ params.qkv).chunk(3, -1)
        (rows,) = here.nonzero(as_tuple=True)
        keys[rows, cache.lengths[rows], 0] = k[rows]
        values[rows, cache.lengths[rows], 0] = v[rows]
        lengths = cache.lengths + here
        scores = torch.einsum("bd,bcd->bc", q, keys[:, :, 0]) / self.width**0.5
        seen = torch.arange(keys.shape[1]) < lengths[:, None].clamp_min(1)
        mixed = torch.einsum("bc,bcd->bd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values[:, :, 0])
        return self.logits(params, x + mixed), Cache(keys=(keys,), values=(values,), lengths=lengths)


@attrs.frozen
class Watched:
    """Passes every call on to another policy and notes the sizes of what it was asked for."""

    inner: Bigram | Attention
    logits_made: list[int] = attrs.field(factory=list)
    prefilled: list[tuple[int, ...]] = attrs.field(factory=list)
    capacities: list[int] = attrs.field(factory=list)
    decoded: list[int] = attrs.field(factory=list)

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def max_positions(self) -> int:
        return self.inner.max_positions

    def hidden(self, params, tokens, positions, segments, *, bounds=None):
        return self.inner.hidden(params, tokens, positions, segments, bounds=bounds)

    def logits(self, params, hidden):
        logits = self.inner.logits(params, hidden)
        self.logits_made.append(logits.numel())
        return logits

    def prefill(self, params, tokens, lengths, capacity):
        self.prefilled.append(tuple(tokens.shape))
        self.capacities.append(capacity)
        return self.inner.prefill(params, tokens, lengths, capacity)

    def decode(self, params, tokens, cache):
        self.decoded.append(tokens.shape[0])
        for leaf in (*cache.keys, *cache.values, cache.lengths):
            assert leaf.shape[0] == tokens.shape[0]
        return self.inner.decode(params, tokens, cache)
