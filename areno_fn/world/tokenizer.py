"""`Tokenizer`: what the library asks of a tokenizer, and `load`, which makes the one a specification names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from areno_fn.contracts import spec as specs
from areno_fn.contracts.errors import CheckpointError
from areno_fn.world.tokenizer_bytes import ByteTokenizer

Messages = Sequence[Mapping[str, Any]]
"""Turns of a conversation, each with a `role` and a `content`."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. It never adds a special token by itself; the caller does, from the fields below."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model needs at least that many embeddings."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The token every plain text starts with, or `None` where this tokenizer starts with none."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a response; the first is the one appended to training rows."""
        ...

    @property
    def pad_id(self) -> int | None:
        """The token that fills rows up where others need it; nothing here reads it."""
        ...

    @property
    def chat(self) -> bool:
        """A chat template is there, so that `render` works."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text; special tokens that the tokenizer knows by name are read as such."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens and ids outside the vocabulary give no text."""
        ...

    def render(self, messages: Messages, add_generation_prompt: bool) -> str:
        """A conversation as text, by the chat template, up to where the assistant speaks when asked to.

        Raises:
            DataError: there is no chat template, or it refuses these messages.
        """
        ...


def load(spec: specs.ByteTokenizer | specs.HFTokenizer, extra_eos: Iterable[int] = ()) -> Tokenizer:
    """The tokenizer a specification names.

    Args:
        extra_eos: end tokens that a model's configuration declares, added after the tokenizer's own.

    Raises:
        CheckpointError: a Hugging Face folder without a readable tokenizer.
    """
    if isinstance(spec, specs.ByteTokenizer):
        return ByteTokenizer(extra_eos=tuple(extra_eos))
    # transformers takes seconds to import, and a run on bytes does not need it
    from areno_fn.world.tokenizer_hf import load_hf

    return load_hf(spec.path, extra_eos)


def declared_eos(folder: str | Path) -> tuple[int, ...]:
    """The end tokens that `config.json` and `generation_config.json` of a folder declare, without repetition.

    Raises:
        CheckpointError: a file is not JSON, or `eos_token_id` in it is neither an integer, a list of them, nor null.
    """
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        path = Path(folder) / name
        if path.is_file():
            found += _eos_of(path)
    return tuple(dict.fromkeys(found))


def _eos_of(path: Path) -> list[int]:
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        value = msgspec.convert(config.get("eos_token_id"), int | list[int] | None)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: not a JSON object with a legal eos_token_id ({error})") from None
    if value is None:
        return []
    return [value] if isinstance(value, int) else value
