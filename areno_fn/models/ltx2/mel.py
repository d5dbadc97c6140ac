"""Mel spectrograms of sound, as the autoencoder of LTX-2 was trained on them."""

from __future__ import annotations

import math

import torch

WINDOW = 1024
"""Samples of a window of Hann, and of its Fourier transform."""

SILENCE = 1e-5
_LINEAR, _BREAK, _LOG = 200.0 / 3, 1000.0, math.log(6.4) / 27
"""Slaney's scale: 200 / 3 Hz a mel below 1 kHz, and 27 mels to each factor of 6.4 above."""


def log_mel(sound: torch.Tensor, rate: int, hop: int, bins: int) -> torch.Tensor:
    """The logarithm of the magnitudes in `bins` bands, [..., 1 + L // hop, bins] of sound [..., L].

    Args:
        sound: float32, of more than half a window.
        rate: samples a second.
        hop: samples from one window to the next; the first is centred on the first sample.
        bins: bands.
    """
    window = torch.hann_window(WINDOW, device=sound.device)
    flat = sound.reshape(-1, sound.shape[-1])
    waves = torch.stft(flat, WINDOW, hop, window=window, center=True, pad_mode="reflect", return_complex=True)
    bands = waves.abs().transpose(1, 2) @ filters(rate, bins).to(sound.device)
    return bands.clamp_min(SILENCE).log().reshape(*sound.shape[:-1], -1, bins)


def filters(rate: int, bins: int) -> torch.Tensor:
    """Triangles of equal area, evenly spaced on Slaney's scale from 0 to rate / 2, float32 [WINDOW / 2 + 1, bins]."""
    heard = torch.linspace(0, rate / 2, WINDOW // 2 + 1, dtype=torch.float64)
    top = _mels(torch.tensor(rate / 2, dtype=torch.float64))
    corners = _hertz(torch.linspace(0, float(top), bins + 2, dtype=torch.float64))
    low, peak, high = corners[:-2], corners[1:-1], corners[2:]
    rising = (heard[:, None] - low) / (peak - low)
    falling = (high - heard[:, None]) / (high - peak)
    return (torch.minimum(rising, falling).clamp_min(0) * 2 / (high - low)).float()


def _mels(hertz: torch.Tensor) -> torch.Tensor:
    return torch.where(hertz < _BREAK, hertz / _LINEAR, _BREAK / _LINEAR + (hertz.clamp_min(1) / _BREAK).log() / _LOG)


def _hertz(mels: torch.Tensor) -> torch.Tensor:
    linear = _BREAK / _LINEAR
    return torch.where(mels < linear, mels * _LINEAR, _BREAK * ((mels - linear) * _LOG).exp())
