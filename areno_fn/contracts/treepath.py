"""Paths of leaves, as code would write them: `layers.0.qkv`."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree


def dotted(path: tuple[Any, ...]) -> str:
    """The path of a node as one string; empty for the root."""
    return ".".join(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves with their dotted paths, in the order of the tree."""
    return [(dotted(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]]
