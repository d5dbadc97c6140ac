"""Latents as tokens and back, the way the transformers of Flux, Flux.2, Qwen-Image and LTX-2 take them."""

from __future__ import annotations

import torch


def packed(latents: torch.Tensor, side: int = 2, frames: int = 1) -> torch.Tensor:
    """Tokens [B, N, C frames side side] of latents [B, C, H, W] or [B, C, F, H, W].

    A token is a patch, its numbers in the order channel, frame, row, column; tokens follow frames, rows, columns.

    Args:
        latents: H and W multiples of `side`, F one of `frames`.
        side, frames: of a patch.
    """
    video = latents.unsqueeze(2) if latents.ndim == 4 else latents
    cut = video.unflatten(4, (-1, side)).unflatten(3, (-1, side)).unflatten(2, (-1, frames))
    return cut.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def unpacked(tokens: torch.Tensor, grid: tuple[int, int, int], side: int = 2, frames: int = 1) -> torch.Tensor:
    """The inverse of `packed`: latents [B, C, F, H, W].

    Args:
        tokens: [B, N, C frames side side].
        grid: patches along frames, rows and columns, N together.
        side, frames: of a patch.
    """
    laid = tokens.unflatten(1, grid).unflatten(4, (-1, frames, side, side))
    return laid.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)
