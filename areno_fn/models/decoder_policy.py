"""The dense decoder as a `TokenPolicy`."""

from __future__ import annotations

import attrs
import torch

from areno_fn.contracts.adapter import Weight
from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.pages import Pages
from areno_fn.contracts.policy import Cache
from areno_fn.contracts.spec_base import Consistency
from areno_fn.kernels.consistency import Primitives, primitives
from areno_fn.models import decoder_cache, decoder_forward, decoder_layer, decoder_pages
from areno_fn.models.decoder import Decoder, DecoderConfig


@attrs.frozen
class DecoderPolicy:
    """The `TokenPolicy` of a dense decoder: its functions with the configuration filled in.

    Attributes:
        config: the model.
        remat: k for every k-th layer, from the first, to keep its input alone for the backward pass, in which it is
            computed again; 1 for all layers, 0 for none.
        consistency: of reading on pages with the forward pass of training.
    """

    config: DecoderConfig
    remat: int = 0
    consistency: Consistency = "ordinary"

    @property
    def _by(self) -> Primitives:
        return primitives(self.consistency)

    def computing_again(self, every: int) -> DecoderPolicy:
        """The same functions, whose backward pass computes every so many-th layer again."""
        return attrs.evolve(self, remat=every)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """The longest sequence the model was made for."""
        return self.config.max_positions

    def hidden(
        self,
        params: Decoder,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        segments: torch.Tensor,
        *,
        bounds: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Final hidden states [N, D]."""
        return decoder_forward.hidden(
            params, self.config, tokens, positions, segments, bounds=bounds, remat=self.remat, by=self._by
        )

    def logits(self, params: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V]."""
        return decoder_layer.logits(params, hidden, self._by)

    def head(self, params: Decoder) -> Weight:
        """The matrix [V, D] that makes logits of hidden states."""
        return params.embed if params.head is None else params.head

    def prefill(
        self, params: Decoder, tokens: torch.Tensor, lengths: torch.Tensor, capacity: int
    ) -> tuple[torch.Tensor, Cache]:
        """Logits [B, V] and a new cache."""
        self._require_plain(tokens)
        return decoder_cache.prefill(params, self.config, tokens, lengths, capacity)

    def decode(self, params: Decoder, tokens: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, Cache]:
        """Logits [B, V] and the cache that replaces the one passed in."""
        self._require_plain(tokens)
        return decoder_cache.decode(params, self.config, tokens, cache)

    def _require_plain(self, tokens: torch.Tensor) -> None:
        if tokens.is_cuda and self.consistency == "bitwise":
            raise ModelError(
                "a plain cache on a GPU has not the bits of training; with consistency 'bitwise' read on pages"
            )

    def pages(self, params: Decoder, count: int, size: int) -> Pages:
        """`count` pages of `size` tokens, zero."""
        return decoder_pages.blank(params, self.config, count, size)

    def page_bytes(self, params: Decoder, size: int) -> int:
        """Bytes of one page of `size` tokens."""
        return decoder_pages.page_bytes(params, self.config, size)

    def read_into(
        self,
        params: Decoder,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        pages: Pages,
        stored: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [B, V] after texts, or parts of them, that are written to their pages."""
        return decoder_pages.read_into(params, self.config, tokens, lengths, table, pages, stored, self._by)

    def read_next(
        self,
        params: Decoder,
        tokens: torch.Tensor,
        stored: torch.Tensor,
        table: torch.Tensor,
        pages: Pages,
        longest: int | None = None,
    ) -> torch.Tensor:
        """Logits [B, V] after one more token a row."""
        return decoder_pages.read_next(params, self.config, tokens, stored, table, pages, longest, self._by)
