"""Decoupled weight decay (AdamW, arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.optim import Transform
from areno_fn.contracts.placement import Placement, Vocabulary
from areno_fn.contracts.spec import Decay

Mask = Callable[[str, torch.Tensor], bool]
"""`(path, leaf) -> bool`: whether a parameter decays."""


def matrices(path: str, leaf: torch.Tensor) -> bool:
    """The rule of which parameters decay: those of two dimensions or more; norms, biases and scalars do not."""
    del path
    return leaf.ndim >= 2


def everything(path: str, leaf: torch.Tensor) -> bool:
    """The rule under which every parameter decays."""
    del path, leaf
    return True


_OUTER = frozenset({"embed", "embed_tokens", "head", "lm_head", "conv"})


def hidden(placements: Mapping[str, Placement] | None = None) -> Mask:
    """The rule of which parameters are hidden matrices: those that map activations to activations.

    They have two dimensions or more, no part of their path is embed, embed_tokens, head, lm_head or conv (the taps of a
    depthwise convolution), and ranks do not share them as a vocabulary.

    Args:
        placements: by path, how ranks share a leaf.
    """
    known = placements or {}

    def is_hidden(path: str, leaf: torch.Tensor) -> bool:
        outer = isinstance(known.get(path), Vocabulary) or not _OUTER.isdisjoint(path.split("."))
        return leaf.ndim >= 2 and not outer

    return is_hidden


def rule(name: Decay, placements: Mapping[str, Placement] | None = None) -> Mask:
    """The rule of that name: "matrices", "hidden" or "all"."""
    return {"matrices": matrices, "hidden": hidden(placements), "all": everything}[name]


def add_decayed_weights(rate: float, mask: Mask = matrices) -> Transform:
    """Adds rate times the parameter to the update of every parameter that the mask selects. Stateless.

    Put it after the scaling by moments and before the learning rate: the decay is then decoupled from the
    gradient and proportional to the learning rate, p <- p - lr (u + rate p).
    """

    def init(params: Any) -> tuple[()]:
        del params
        return ()

    def update(updates: Any, state: tuple[()], params: Any) -> tuple[Any, tuple[()]]:
        named = tree.leaves_with_path(params)
        chosen = [i for i, (path, leaf) in enumerate(named) if rate and mask(path, leaf)]
        leaves = tree.leaves(updates)
        if chosen:
            added = torch._foreach_add([leaves[i] for i in chosen], [named[i][1] for i in chosen], alpha=rate)
            for i, leaf in zip(chosen, added, strict=True):
                leaves[i] = leaf
        return tree.unflatten(updates, leaves), state

    return Transform(init=init, update=update)
