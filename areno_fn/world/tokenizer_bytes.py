"""`ByteTokenizer`: the 256 bytes of UTF-8 and three special tokens. It needs no file and knows every text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from areno_fn.contracts.errors import DataError

BOS, EOS, PAD = 256, 257, 258
SPECIALS = {"<|bos|>": BOS, "<|eos|>": EOS, "<|pad|>": PAD}
"""How the special tokens are written in an exported tokenizer. In a text these are ordinary characters."""


@attrs.frozen(kw_only=True)
class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 begins a text, 257 ends it, 258 is never read.

    A model may have a larger, rounded vocabulary: ids past 258 decode to nothing, as the special tokens do.

    Attributes:
        extra_eos: further end tokens.
    """

    extra_eos: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        """259."""
        return PAD + 1

    @property
    def bos_id(self) -> int | None:
        """256: every text starts with it."""
        return BOS

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """257, then the further ones."""
        return tuple(dict.fromkeys((EOS, *self.extra_eos))) if self.extra_eos else (EOS,)

    @property
    def pad_id(self) -> int | None:
        """258."""
        return PAD

    @property
    def chat(self) -> bool:
        """False: bytes have no chat template."""
        return False

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of a text; half a surrogate pair, which UTF-8 cannot write, becomes `?`."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """The bytes among the ids, read as UTF-8; what is not UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """Refuses: there is no chat template."""
        del messages, add_generation_prompt
        raise DataError("the byte tokenizer has no chat template; give 'prompt' and 'response' as text")
