"""Decoupled weight decay (AdamW, arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.optim import Transform

Mask = Callable[[str, torch.Tensor], bool]
"""`(path, leaf) -> bool`: whether a parameter decays."""


def matrices(path: str, leaf: torch.Tensor) -> bool:
    """The rule of which parameters decay: those of two dimensions or more; norms, biases and scalars do not."""
    del path
    return leaf.ndim >= 2


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
