"""Trees of adapters: how they begin, how they stand in a model, and how they are merged into it.

The adapters of a model are a tree of their own, `{module: LowRank}` by the module's name in the file. The frozen
parameters are another. `adapt` puts the two together, into what a policy takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from areno_fn import random, tree
from areno_fn.contracts.adapter import Adapted, LowRank
from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.key import Key
from areno_fn.kernels.merge import merged, unmerged
from areno_fn.models.adapter_sites import Runs, Site

T = TypeVar("T")

Adapters = dict[str, LowRank]


def shapes(
    sites: Sequence[Site], rank: Callable[[str], int], scale: Callable[[str], float], dtype: torch.dtype = torch.float32
) -> Adapters:
    """The adapters of some sites as meta tensors.

    Args:
        sites: what is adapted.
        rank, scale: of a module.
        dtype: of the matrices.
    """

    def part(site: Site) -> LowRank:
        r = rank(site.module)
        return LowRank(
            a=torch.empty((r, site.columns), dtype=dtype, device="meta"),
            b=torch.empty((site.rows, r), dtype=dtype, device="meta"),
            scale=scale(site.module),
        )

    return {site.module: part(site) for site in sites}


def init(like: Adapters, key: Key, device: torch.device | str = "cpu") -> Adapters:
    """Adapters that change nothing yet: A uniform in (-1/sqrt(D), 1/sqrt(D)), B zero.

    That is the distribution of PEFT (Kaiming's with a = sqrt(5)). A number is a function of (key, module, row,
    column).

    Args:
        like: what `shapes` returned.
        key: the random stream; it is folded, never advanced.
        device: where the leaves lie.
    """

    def start(module: str, part: LowRank) -> LowRank:
        rows, columns = part.a.shape
        places = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
        drawn = random.uniform(key.fold(module), *places, dtype=part.a.dtype)
        b = torch.zeros(part.b.shape, dtype=part.b.dtype, device=device)
        # multiplied, because a GPU divides by a number by multiplying with its rounded inverse
        return LowRank(a=(2 * drawn - 1) * (1 / math.sqrt(columns)), b=b, scale=part.scale)

    return {module: start(module, part) for module, part in like.items()}


def adapt(base: T, adapters: Mapping[str, LowRank], sites: Sequence[Site], dtype: torch.dtype | None = None) -> T:
    """The parameters with an `Adapted` in the place of every weight that has adapters; no weight is copied.

    Args:
        base: the parameter tree of the model.
        adapters: one for each site.
        sites: where they belong.
        dtype: of the changes; that of the weight when omitted, in which a policy multiplies with them.

    Raises:
        ModelError: adapters and sites do not go together.
    """
    if adapters.keys() != {site.module for site in sites}:
        differing = sorted(adapters.keys() ^ {site.module for site in sites})
        raise ModelError(
            f"adapters and sites must be of the same modules, but one of them lacks {', '.join(differing)}"
        )
    places: dict[str, list[Site]] = {}
    for site in sites:
        for leaf in dict.fromkeys(leaf for leaf, _, _ in site.runs):
            places.setdefault(leaf, []).append(site)

    def stand(path: str, leaf: Any) -> Any:
        if path not in places:
            return leaf
        parts = [(adapters[site.module], site.runs) for site in places[path]]
        a = parts[0][0].a if len(parts) == 1 else torch.cat([part.a for part, _ in parts])
        kind = leaf.dtype if dtype is None else dtype
        return Adapted(weight=leaf, a=a.to(kind), b=_diagonal(path, parts, leaf.shape[0]).to(kind))

    return tree.map_with_path(stand, base)


def _diagonal(leaf: str, parts: Sequence[tuple[LowRank, Runs]], rows: int) -> torch.Tensor:
    """The scaled B of all parts of a leaf [rows, R]: each in columns of its own, in the rows where it belongs, else zeros."""
    pieces: list[tuple[int, torch.Tensor, int]] = []  # first row in the leaf, what stands there, its first column
    column = 0
    for part, runs in parts:
        cut = (part.b * part.scale).split([count for _, _, count in runs])
        pieces += [(start, piece, column) for (own, start, _), piece in zip(runs, cut, strict=True) if own == leaf]
        column += part.b.shape[1]
    pieces.sort(key=lambda item: item[0])
    ends = [start for start, _, _ in pieces[1:]] + [rows]
    blocks = [
        F.pad(piece, (left, column - left - piece.shape[1], start if number == 0 else 0, end - start - piece.shape[0]))
        for number, ((start, piece, left), end) in enumerate(zip(pieces, ends, strict=True))
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def merge(params: T, dtype: torch.dtype | Callable[[str], torch.dtype] | None = None) -> T:
    """Parameters with plain weights in the place of adapted ones; the others are as they were.

    Args:
        params: what `adapt` returned, or an `Adapted` alone.
        dtype: of merged weights, which are computed in float32 and rounded once; given for all, or by path. That of
            the frozen weight when omitted.
    """

    def one(path: str, node: Any) -> Any:
        if not isinstance(node, Adapted):
            return node
        return merged(node, dtype if dtype is None or isinstance(dtype, torch.dtype) else dtype(path))

    return tree.map_with_path(one, params, is_leaf=_is_adapted)


def unmerge(params: T, adapted: Any) -> T:
    """The inverse of `merge`, up to roundings: the frozen parameters.

    Args:
        params: what `merge` returned.
        adapted: what was merged; of adapted weights, only the changes are read.
    """
    given = dict(tree.leaves_with_path(params))

    def one(path: str, node: Any) -> Any:
        return unmerged(given[path], node) if isinstance(node, Adapted) else given[path]

    return tree.map_with_path(one, adapted, is_leaf=_is_adapted)


def _is_adapted(node: Any) -> bool:
    return isinstance(node, Adapted)
