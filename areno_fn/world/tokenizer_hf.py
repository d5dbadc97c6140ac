"""`HFTokenizer`: the tokenizer and chat template of a Hugging Face folder, read from disk alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import jinja2
import msgspec

from areno_fn.contracts.errors import CheckpointError, DataError
from areno_fn.world.tokenizer import Messages
from areno_fn.world.tokenizer_backend import read_backend

_REFUSALS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a template can raise: it computes with whatever the messages hold."""

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@attrs.frozen(kw_only=True)
class HFTokenizer:
    """A transformers tokenizer behind the `Tokenizer` protocol.

    Attributes:
        path: the folder, for messages.
        backend: the transformers tokenizer.
        vocab_size, bos_id, eos_ids: as in the protocol.
    """

    path: str
    backend: Any
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]

    @property
    def pad_id(self) -> int | None:
        """The backend's."""
        found = self.backend.pad_token_id
        return found if isinstance(found, int) else None

    @property
    def chat(self) -> bool:
        """The folder holds a chat template."""
        return self.backend.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without the tokens that transformers adds around one."""
        return list(self.backend.encode(text, add_special_tokens=False, verbose=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, spaces as they are; special and unknown ids give no text."""
        return str(self.backend.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def render(self, messages: Messages, add_generation_prompt: bool) -> str:
        """A conversation as text, by the chat template."""
        if not self.chat:
            raise DataError(f"the tokenizer in {self.path} has no chat template; give 'prompt' and 'response' as text")
        turns = [dict(message) for message in messages]
        try:
            return str(
                self.backend.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
            )
        except _REFUSALS as error:
            raise DataError(f"the chat template in {self.path} refuses these messages ({error})") from error


def load_hf(path: str, extra_eos: Iterable[int] = ()) -> HFTokenizer:
    """Reads the tokenizer of a folder; nothing is downloaded and no code in the folder is run.

    Args:
        extra_eos: end tokens that the model's configuration declares, added after the tokenizer's own.

    Raises:
        CheckpointError: the folder or its tokenizer files are missing or damaged.
    """
    folder = Path(path)
    _require_files(folder)
    read = read_backend(folder)
    backend = read.own
    own = [] if backend.eos_token_id is None else [backend.eos_token_id]
    return HFTokenizer(
        path=str(folder),
        backend=backend,
        vocab_size=read.vocab_size,
        # the one that transformers itself puts before a text: a tokenizer may own one and yet not use it
        bos_id=read.first if read.first == backend.bos_token_id else None,
        eos_ids=tuple(dict.fromkeys([*own, *extra_eos])),
    )


def _require_files(folder: Path) -> None:
    if not os.path.isdir(folder):  # of a path that cannot be one, too
        raise CheckpointError(f"the tokenizer folder {folder} does not exist; give the path of a Hugging Face folder")
    if not any((folder / name).is_file() for name in _FILES):
        raise CheckpointError(f"{folder} holds no tokenizer; one of {', '.join(_FILES)} is needed")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = folder / name
        try:
            msgspec.json.decode(file.read_bytes() if file.is_file() else b"{}", type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{file} is damaged: {error}") from None
