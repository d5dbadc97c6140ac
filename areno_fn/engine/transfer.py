"""Batches on their way to a device."""

from __future__ import annotations

from typing import TypeVar

import torch

from areno_fn import tree

T = TypeVar("T")


def to_device(batch: T, device: torch.device) -> T:
    """The batch with its tensors on a device. To a GPU they go through page-locked memory, and the host does not wait."""

    def moved(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if device.type == "cuda" and leaf.device.type == "cpu":
            return leaf.pin_memory().to(device, non_blocking=True)
        return leaf.to(device)

    found: T = tree.map(moved, batch)
    return found
