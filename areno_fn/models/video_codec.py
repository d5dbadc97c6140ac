"""Videos to latents and back, by autoencoders that give the mean and the deviation of each channel (Wan, Qwen-Image)."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn.contracts.errors import ModelError


def encoded(vae: Any, videos: torch.Tensor) -> torch.Tensor:
    """The most likely latents [B, c, F, h, w] of videos [B, T, 3, H, W] from 0 to 1, of mean 0 and deviation 1."""
    return scaled(vae, encoded_pixels(vae, 2 * videos.transpose(1, 2) - 1))


def encoded_pixels(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """The most likely latents of what an autoencoder takes, [B, 3, T, H, W] from -1 to 1, before they are scaled."""
    found: torch.Tensor = vae.encode(pixels.to(device=vae.device, dtype=vae.dtype)).latent_dist.mode()
    return found


def scaled(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents [B, c, F, h, w] brought to mean 0 and deviation 1."""
    mean, std = _statistics(vae, latents)
    return (latents - mean) / std


def decoded(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """The videos [B, T, 3, H, W] of latents, float32, cut to the range from 0 to 1."""
    latents = latents.to(device=vae.device, dtype=vae.dtype)
    mean, std = _statistics(vae, latents)
    pixels = vae.decode(latents * std + mean, return_dict=False)[0]
    return (pixels.float() / 2 + 0.5).clamp(0, 1).transpose(1, 2)


def require_videos(videos: torch.Tensor, frames: int, height: int, width: int) -> None:
    """Refuses videos of another size than the adapter's.

    Raises:
        ModelError: names both shapes.
    """
    if videos.ndim != 5 or tuple(videos.shape[1:]) != (frames, 3, height, width):
        raise ModelError(f"the videos must be [B, {frames}, 3, {height}, {width}], received {list(videos.shape)}")


def _statistics(vae: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean, std = (
        torch.tensor(x).to(like)[:, None, None, None] for x in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std
