"""Sound to latents and back, by the autoencoder of mel spectrograms and the vocoder of LTX-2."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn.contracts.errors import ModelError
from areno_fn.models.ltx2.mel import log_mel

COMPRESSION = 4
"""Frames, and bands, of a spectrogram that become one latent; the first latent of a sound is of one frame."""


def encoded(vae: Any, sound: torch.Tensor, rate: int, tokens: int) -> torch.Tensor:
    """The most likely latents [B, tokens, A] of sound, of mean 0 and deviation 1.

    Args:
        vae: the autoencoder.
        sound: [B, C, L], at `rate` samples a second.
        rate: brought to that of the autoencoder.
        tokens: of the sound; what is longer is cut.

    Raises:
        ModelError: the sound is too short for them.
    """
    own, hop, frames = vae.config.sample_rate, vae.config.mel_hop_length, COMPRESSION * (tokens - 1) + 1
    heard = resampled(sound, round(sound.shape[-1] * own / rate))
    if heard.shape[-1] // hop + 1 < frames or heard.shape[1] != vae.config.in_channels:
        raise ModelError(
            f"the sounds must be [B, {vae.config.in_channels}, L] and last {frames * hop / own:.3f} s, "
            f"received {list(sound.shape)} at {rate} samples a second"
        )
    bands = log_mel(heard, own, hop, vae.config.mel_bins)[:, :, :frames]
    found = vae.encode(bands.to(device=vae.device, dtype=vae.dtype)).latent_dist.mode()
    return (found.transpose(1, 2).flatten(2) - vae.latents_mean) / vae.latents_std


def decoded(vae: Any, vocoder: Any, latents: torch.Tensor) -> torch.Tensor:
    """The sound [B, C, L], float32, of latents [B, tokens, A]."""
    spread = latents.to(device=vae.device, dtype=vae.dtype) * vae.latents_std + vae.latents_mean
    cut = spread.unflatten(2, (-1, vae.config.mel_bins // COMPRESSION)).transpose(1, 2)
    sound: torch.Tensor = vocoder(vae.decode(cut, return_dict=False)[0].to(vocoder.dtype))
    return sound.float()


def resampled(sound: torch.Tensor, length: int) -> torch.Tensor:
    """Sound [..., L] as so many samples, whose Fourier series goes on to be that of the sound as far as both reach."""
    before = sound.shape[-1]
    if length == before:
        return sound
    waves = torch.fft.rfft(sound)
    kept = min(before, length) // 2 + 1
    cut = waves[..., :kept].clone()
    if min(before, length) % 2 == 0:  # the highest of an even number of samples stands for two, or the other way round
        cut[..., -1] *= 2.0 if length < before else 0.5
        cut[..., -1] = cut[..., -1].real.to(cut.dtype) if length < before else cut[..., -1]
    return torch.fft.irfft(cut, n=length) * (length / before)
