"""What prompts become: a pipeline of diffusers without its transformer, which alone knows how one is put to a text encoder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.media import Request
from areno_fn.models.diffusers_module import diffusers_class


def bare_pipeline(class_name: str, parts: Mapping[str, Any]) -> Any:
    """The pipeline with the parts that are given, and None for the others that it needs.

    Args:
        class_name: its class in diffusers.
        parts: frozen ones by name.

    Raises:
        ModelError: diffusers is not installed, or has no such class.
    """
    kind = diffusers_class(class_name)
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


def filled_up(states: torch.Tensor, length: int) -> torch.Tensor:
    """States [1, L, D] or marks [1, L] with zeros behind them, [1, length, D] or [1, length]; longer ones are cut."""
    cut = states[:, :length]
    return torch.cat([cut, cut.new_zeros(1, length - cut.shape[1], *cut.shape[2:])], 1)
