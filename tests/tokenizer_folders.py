"""Small Hugging Face tokenizer folders, built where a test needs them so that nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "user\nassistant\nsystem\nYou are a helpful assistant.\n",
    "What is the capital of France?\nThe capital of France is Paris.\n\n",
    "the the then there where what when this that 12 34 46 99\n\n  indented\n\nlines",
] * 4

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BOS_CHATML = "{{ bos_token }}" + CHATML
# earlier turns lose what the last one is written with, as Qwen3 does with its empty thoughts
LAST_TURN_DIFFERS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ASKS_OTHERWISE = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(folder: Path, template: str | None = CHATML, *, bos: bool = False, **config: Any) -> Path:
    """A byte-level BPE with 40 merges and the special tokens 0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|>.

    With `bos`, token 0 is put before every text, as Llama 3 does. EOS is 2.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    return _write(folder, tokenizer, template, bos_token="<|endoftext|>" if bos else "<|im_start|>", **config)


def metaspace(folder: Path) -> Path:
    """A Llama-2-like tokenizer: a space is put before a text's beginning, `<s>` (0) before every text, EOS `</s>` (1).

    Its tokens are characters, and "sum".
    """
    vocabulary = ["<s>", "</s>", "<unk>", *"\u2581+=0123456789abcdefghijklmnopqrstuvwxyz", "um", "sum"]
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[("u", "m"), ("s", "um")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return _write(folder, tokenizer, None, bos_token="<s>", eos_token="</s>")


def _write(folder: Path, tokenizer: Tokenizer, template: str | None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
    } | config
    if template is not None:
        values["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder
