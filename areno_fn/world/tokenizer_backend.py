"""A tokenizer as transformers reads it from a folder, or one sentence about what is wrong there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
from transformers import AutoTokenizer

from areno_fn.contracts.errors import CheckpointError


@attrs.frozen(kw_only=True)
class Backend:
    """A transformers tokenizer that has encoded a text.

    Attributes:
        own: the tokenizer.
        vocab_size: one more than the largest id in its vocabulary.
        first: the first id of a text with the tokens that transformers adds around one.
    """

    own: Any
    vocab_size: int
    first: int


def read_backend(folder: Path) -> Backend:
    """Reads the tokenizer of a folder, with its config.json; nothing is downloaded and no code in the folder is run.

    Raises:
        CheckpointError: transformers cannot read it, or it cannot encode a text.
    """
    try:
        return _read(folder)
    except Exception as error:  # of three libraries, one of which raises this very class for damaged files
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise CheckpointError(f"{folder}: transformers cannot read this tokenizer ({reason})") from error


def _read(folder: Path) -> Backend:
    own = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    ids = own.get_vocab().values()
    return Backend(own=own, vocab_size=1 + max(ids), first=own.encode("a", add_special_tokens=True)[0])
