"""What a model answers. An algorithm knows models only through these protocols."""

from __future__ import annotations

from typing import Any, Protocol, Self, runtime_checkable

import torch

from areno_fn.contracts.record import record
from areno_fn.contracts.spec_base import Consistency


@runtime_checkable
class Consistent(Protocol):
    """A policy that says how consistent it is; one that does not is ordinary."""

    @property
    def consistency(self) -> Consistency:
        """Of reading texts, reading one more token, and the forward pass of training."""
        ...


def is_bitwise(policy: TokenPolicy) -> bool:
    """Whether rollout and training agree in every bit of what the policy answers."""
    return isinstance(policy, Consistent) and policy.consistency == "bitwise"


@record
class Cache:
    """Keys and values of the tokens read so far; every leaf has the batch as its first dimension.

    Attributes:
        keys: per layer, [B, capacity, kv_heads, head_dim].
        values: per layer, the same shape.
        lengths: int64 [B], tokens stored per row.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    lengths: torch.Tensor


@runtime_checkable
class ComputesAgain(Protocol):
    """A policy whose layers can be computed again in the backward pass, instead of keeping what they made."""

    def computing_again(self, every: int) -> Self:
        """The same policy, of which every so many-th layer, from the first, keeps its input alone; 0 for none."""
        ...


class TokenPolicy(Protocol):
    """A language model as functions of its parameters. N packed tokens, B rows, D width, V vocabulary.

    A cache is a tree of tensors, such as a `Cache` or a dict, every one with the B rows as its first dimension: rows are
    copied for the samples of a prompt, and taken out when they end.
    """

    @property
    def vocab_size(self) -> int:
        """V: number of logits."""
        ...

    @property
    def max_positions(self) -> int:
        """The longest sequence the model was made for."""
        ...

    def hidden(
        self,
        params: Any,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        segments: torch.Tensor,
        *,
        bounds: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Final hidden states [N, D] of packed documents.

        Args:
            bounds: (number of documents, length of the longest) when known; found from `segments` otherwise.
        """
        ...

    def logits(self, params: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., D]."""
        ...

    def prefill(
        self, params: Any, tokens: torch.Tensor, lengths: torch.Tensor, capacity: int
    ) -> tuple[torch.Tensor, Any]:
        """Reads right-padded prompts [B, L]; returns the logits [B, V] after each row's last token, and a cache.

        Args:
            capacity: the most tokens that a row will have been read of, by this and by `decode`.
        """
        ...

    def decode(self, params: Any, tokens: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """Reads one more token a row [B]; the cache passed in is donated. Returns logits [B, V] and the cache."""
        ...
