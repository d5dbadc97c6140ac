"""What prompts become: a pipeline of diffusers without its transformer, which alone knows how one is put to a text encoder."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.media import Request
from areno_fn.models.diffusers_module import diffusers_class


def bare_pipeline(class_name: str, parts: Mapping[str, Any]) -> Any:
    """The pipeline with the parts that are given, and None for the others that it needs.

    Args:
        class_name: its class in diffusers.
        parts: frozen ones by name.

    Raises:
        ModelError: diffusers is not installed, or has no such class, or ftfy is not, by which the class cleans prompts: without
            it, some classes would put other prompts to the encoder, and others none.
    """
    kind = diffusers_class(class_name)
    if not getattr(sys.modules[kind.__module__], "is_ftfy_available", lambda: True)():
        raise ModelError(f"{class_name} cleans prompts by ftfy, which is not installed; pip install ftfy brings it")
    wanted = [p for p in inspect.signature(kind.__init__).parameters.values() if p.name != "self"]
    needed = {p.name: None for p in wanted if p.default is inspect.Parameter.empty}
    return kind(**needed | {p.name: parts[p.name] for p in wanted if p.name in parts})


def conditions_of(request: Request, said: Callable[[str], dict[str, Any]], *, negative: bool) -> Conditions:
    """The conditions of a request: of its prompt, and of its negative prompt where those are wanted.

    Args:
        request: without a negative prompt, the negative conditions are those of an empty one.
        said: the condition of a prompt, first dimensions 1.
        negative: whether negative conditions are wanted.
    """
    return Conditions(positive=said(request.prompt), negative=said(request.negative_prompt or "") if negative else None)


class _Heard(Exception):
    """A tokenizer has been asked, and nothing else need be."""

    def __init__(self, length: int, most: int) -> None:
        super().__init__()
        self.length = length
        self.most = most


class _Listening:
    """A tokenizer, or a processor, that tells how long what it is asked about would be if it were not cut."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, *, max_length: int, **given: Any) -> None:
        del given
        texts = [text] if isinstance(text, str) else text
        raise _Heard(len(self._tokenizer(texts, verbose=False)["input_ids"][0]), max_length)

    def apply_chat_template(self, messages: Any, *, tokenize: bool, max_length: int = 0, **given: Any) -> Any:
        if not tokenize:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, **given)
        whole = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
        raise _Heard(len(whole["input_ids"][0]), max_length)


class _Unasked:
    """In the place of a text encoder that is not asked."""

    dtype = torch.float32
    device = torch.device("cpu")


def length_as_put(class_name: str, tokenizer: Any, prompt: str, **given: Any) -> tuple[int, int]:
    """How many tokens a prompt becomes as a pipeline puts it to its only encoder, and how many it keeps of them.

    The pipeline is asked to encode the prompt, which ends when it asks its tokenizer.

    Args:
        class_name: of the pipeline in diffusers.
        tokenizer: its own.
        prompt: the words.
        given: further arguments of its `encode_prompt`.
    """
    words = bare_pipeline(class_name, {"tokenizer": _Listening(tokenizer), "text_encoder": _Unasked()})
    try:
        words.encode_prompt([prompt], device=_Unasked.device, **given)
    except _Heard as heard:
        return heard.length, heard.most
    raise AssertionError(f"{class_name} has encoded a prompt without its tokenizer")


def filled_up(states: torch.Tensor, length: int) -> torch.Tensor:
    """States [1, L, D] or marks [1, L] with zeros behind them, [1, length, D] or [1, length]; longer ones are cut."""
    cut = states[:, :length]
    return torch.cat([cut, cut.new_zeros(1, length - cut.shape[1], *cut.shape[2:])], 1)
