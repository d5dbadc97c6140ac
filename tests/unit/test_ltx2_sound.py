"""Sound of LTX-2 against scipy and transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flow_models import numbers
from scipy.signal import resample
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from areno_fn.models.ltx2.mel import filters, log_mel
from areno_fn.models.ltx2.sound import resampled


@pytest.mark.parametrize("length", [50, 51, 100, 101, 160, 161])
@pytest.mark.parametrize("before", [100, 101])
def test_resampling_keeps_the_fourier_series(before: int, length: int) -> None:
    sound = numbers("sound", 2, before, dtype=torch.float64)
    assert np.allclose(resampled(sound, length).numpy(), resample(sound.numpy(), length, axis=-1), atol=1e-12)


@pytest.mark.parametrize(("rate", "bins"), [(16000, 64), (24000, 80)])
def test_bands_are_those_of_slaney(rate: int, bins: int) -> None:
    bank = mel_filter_bank(513, bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    assert np.abs(filters(rate, bins).numpy() - bank).max() <= 1e-7
    sound = numbers("sound", 1, 2, 3200)
    given = {"power": 1.0, "mel_filters": bank, "mel_floor": 1e-5, "log_mel": "log"}
    expected = spectrogram(sound[0, 1].numpy(), window_function(1024, "hann"), 1024, 160, **given).T
    received = log_mel(sound, rate, 160, bins)
    assert received.shape == (1, 2, 21, bins)
    assert np.abs(received[0, 1].numpy() - expected).max() <= 1e-5
