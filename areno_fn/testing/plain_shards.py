"""What a rank holds of a tensor, by plain slicing: the placements a second time, written without layouts."""

from __future__ import annotations

import torch

from areno_fn.contracts.placement import Block, Fused, Placement, Replicated, Split, Vocabulary


def plain_shard(tensor: torch.Tensor, placement: Placement, rank: int, ranks: int) -> torch.Tensor:
    """The slice of `tensor` that belongs to one of `ranks` ranks.

    The rows of each are listed one by one: row i of a split of n rows belongs to rank i * ranks // n.
    """
    match placement:
        case Replicated():
            return tensor
        case Split(dim):
            return _chosen(tensor, dim, _owned(tensor.shape[dim], rank, ranks))
        case Vocabulary(dim):
            return _vocabulary(tensor, dim, rank, ranks)
        case Fused(blocks, dim):
            rows, start = [], 0
            for block in blocks:
                rows += [start + row for row in _block_rows(block, rank, ranks)]
                start += block.size
            return _chosen(tensor, dim, rows)


def _owned(size: int, rank: int, ranks: int) -> list[int]:
    return [row for row in range(size) if row * ranks // size == rank]


def _block_rows(block: Block, rank: int, ranks: int) -> list[int]:
    if not block.heads or block.heads >= ranks:
        return _owned(block.size, rank, ranks)
    head = rank * block.heads // ranks
    return [row for row in range(block.size) if row * block.heads // block.size == head]


def _vocabulary(tensor: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    each = -(-tensor.shape[dim] // ranks)
    rows = range(rank * each, (rank + 1) * each)
    held = _chosen(tensor, dim, [row for row in rows if row < tensor.shape[dim]])
    shape = list(tensor.shape)
    shape[dim] = each - held.shape[dim]
    return torch.cat([held, torch.zeros(shape, dtype=tensor.dtype)], dim)


def _chosen(tensor: torch.Tensor, dim: int, rows: list[int]) -> torch.Tensor:
    return tensor.index_select(dim, torch.tensor(rows, dtype=torch.int64))
