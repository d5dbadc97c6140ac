"""`export`: the byte tokenizer as files that Hugging Face libraries load, with the same ids for every text."""

from __future__ import annotations

from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from areno_fn.world.tokenizer_bytes import BOS, EOS, PAD, SPECIALS


def export(folder: str | Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` of the byte tokenizer into an existing folder.

    `AutoTokenizer` then encodes a text to a BOS and its bytes, as training rows start, and decodes like
    `ByteTokenizer`. One exception lies outside: for `model_type` "qwen2" transformers replaces the class
    that the files name by its own, which also composes Unicode characters (NFC).
    """
    (bos, _), (eos, _), (pad, _) = SPECIALS.items()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "clean_up_tokenization_spaces": False,
        # a text that happens to spell a special token is still bytes
        "split_special_tokens": True,
        "model_max_length": 2**30,
    }
    target = Path(folder)
    (target / "tokenizer.json").write_text(build().to_str(pretty=True), encoding="utf-8")
    (target / "tokenizer_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")


def build() -> Tokenizer:
    """The byte tokenizer as a byte-level BPE without merges: each is written as one character and stays one token."""
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    bos = next(name for name, number in SPECIALS.items() if number == BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BOS)]
    )
    assert [tokenizer.token_to_id(name) for name in SPECIALS] == [BOS, EOS, PAD]
    return tokenizer


def _alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE (GPT-2).

    Printable Latin-1 characters stand for themselves; the other bytes take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
