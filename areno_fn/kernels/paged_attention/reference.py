"""Paged attention in plain torch: the pages of a row are laid side by side, and attended to as a plain cache is.

So its bits are those of `cached_attention`, and with `key_places` those of training.
"""

from __future__ import annotations

import torch

from areno_fn.kernels.attention import cached_attention, key_places


def forward(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int,
    longest: int,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """The attended values [B, H, head_dim]."""
    size, room = keys.shape[1], table.shape[1] * keys.shape[1]
    if not q.numel():
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not window:
        span = min(key_places(longest, q.device), room)
        places = torch.arange(span, device=q.device).expand(q.shape[0], span)
        seen = lengths
    else:  # the last places of a row come first, so that what is seen is again a beginning
        span = min(window, longest)
        places = (lengths[:, None] - 1 - torch.arange(span, device=q.device)).clamp_min(0)
        seen = lengths.clamp_max(span)
    flat = table.gather(1, places // size) * size + places % size
    row_keys, row_values = (x.flatten(0, 1)[flat] for x in (keys, values))
    return cached_attention(q, row_keys, row_values, seen, scale, soft_cap=soft_cap).contiguous()


def write(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
    """Writes keys and values of tokens to their places."""
    page, within = places // keys.shape[1], places % keys.shape[1]
    keys[page, within], values[page, within] = k, v
