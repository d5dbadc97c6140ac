"""The last figures of `benchmarks/kernels.py`, which writes this; those of passes apart are of `benchmarks/kernel_tiles.py`."""

from __future__ import annotations

DEVICE = "NVIDIA H200, torch 2.11.0+cu130, copy 4290 GB/s, matmul 787 to 811 TFLOP/s"

MEASURED = (
    ("rms_norm 1x131072x1024 plain", "1x131072x1024 plain: 0.342 ms, 0.91 of the floor, 0.54 GB"),
    (
        "rms_norm 16384x16x128 plain",
        "16384x16x128 plain: 0.036 ms forward and 0.066 ms backward, apart, 0.87 and 0.72 of their floors",
    ),
    (
        "rms_norm 1x16384x4096 zero centred",
        "1x16384x4096 zero centred: 0.213 ms (+- 0.105, on a busy host), 0.73 of the floor, 0.28 GB",
    ),
    ("add_rms_norm 1x16384x1024", "1x16384x1024: 0.087 ms, 0.81 of the floor, 0.14 GB"),
    ("add_rms_norm 1x131072x1024", "1x131072x1024: 0.591 ms, 0.95 of the floor, 1.08 GB"),
    ("gated_silu 1x16384x3072", "1x16384x3072: 0.191 ms, 0.98 of the floor, 0.30 GB"),
    ("gated_silu 1x4096x12288", "1x4096x12288: 0.200 ms, 0.94 of the floor, 0.30 GB"),
    ("rotary 16384x16x64", "16384x16x64: 0.075 ms, 0.89 of the floor, 0.13 GB"),
    ("rotary 16384x8x64", "16384x8x64: 0.043 ms, 0.83 of the floor, 0.07 GB"),
    (
        "norm_rotary 16384x8x64 normed",
        "16384x8x64 normed: 0.056 ms forward and 0.107 ms backward, apart, 0.88 and 0.75 of their floors",
    ),
    ("norm_rotary 16384x8x64 rotated", "16384x8x64 rotated: 0.133 ms, 0.97 of the floor, 0.23 GB"),
    ("token_logp 4096x151936 open", "4096x151936 open: 1.127 ms, 0.77 of the floor, 1.24 GB"),
    ("token_logp 2048x151936 truncated", "2048x151936 truncated: 0.576 ms, 0.75 of the floor, 0.62 GB"),
    ("linear_token_logp 4096x1024x151936 plain", "4096x1024x151936 plain: 8.467 ms, 0.57 of the floor, 0.64 GB"),
    ("linear_token_logp 16384x1024x151936 plain", "16384x1024x151936 plain: 36.233 ms, 0.54 of the floor, 0.68 GB"),
    (
        "linear_token_loss 16384x1024x151936 plain",
        "16384x1024x151936 plain, 2048 rows at once: 27.295 ms, 0.69 of the floor, 1.59 GB",
    ),
    ("attention 4 x 4096", "4 x 4096: 1.940 ms, 496 TFLOP/s, 0.47 GB"),
    ("attention 16 x 1024", "16 x 1024: 0.747 ms, 322 TFLOP/s, 0.47 GB"),
    ("attention ragged, 16384 in all", "ragged, 16384 in all: 2.553 ms, 235 TFLOP/s, 0.48 GB"),
    (
        "attention 8x2x128x4096x3000x900x196 cap 50",
        "8x2x128x4096x3000x900x196 cap 50: 0.829 ms forward and 2.179 ms backward, apart, 0.16 and 0.15 of their floors",
    ),
    (
        "attention 4x2x256x4096x2048x2048 window 1024 cap 50",
        "4x2x256x4096x2048x2048 window 1024 cap 50: 0.352 ms forward and 1.727 ms backward, apart, 0.20 and 0.10 of their floors",
    ),
)
"""Labels and lines."""
