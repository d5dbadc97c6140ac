"""Which files of a Hugging Face folder are its tokenizer."""

from __future__ import annotations

from pathlib import Path

PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*",
    "*.model",
    "*.tiktoken",
)


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Those that are there, by their names in the folder, in order."""
    found = {path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()}
    return {path.relative_to(folder).as_posix(): path for path in sorted(found)}
