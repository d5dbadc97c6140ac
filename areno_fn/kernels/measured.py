"""The last figures of `benchmarks/kernels.py`; written by it."""

from __future__ import annotations

DEVICE = "NVIDIA H200, torch 2.11.0+cu130, copy 4267 GB/s, matmul 785 TFLOP/s"

MEASURED = (
    ("rms_norm 1x131072x1024 plain", "1x131072x1024 plain: 0.341 ms, 0.92 of the floor, 0.54 GB"),
    ("rms_norm 16384x16x128 plain", "16384x16x128 plain: 0.101 ms, 0.78 of the floor, 0.13 GB"),
    ("rms_norm 1x16384x4096 zero centred", "1x16384x4096 zero centred: 0.182 ms, 0.87 of the floor, 0.28 GB"),
    ("add_rms_norm 1x16384x1024", "1x16384x1024: 0.107 ms, 0.66 of the floor, 0.14 GB"),
    ("add_rms_norm 1x131072x1024", "1x131072x1024: 0.597 ms, 0.95 of the floor, 1.08 GB"),
    ("gated_silu 1x16384x3072", "1x16384x3072: 0.192 ms, 0.98 of the floor, 0.30 GB"),
    ("gated_silu 1x4096x12288", "1x4096x12288: 0.192 ms, 0.98 of the floor, 0.30 GB"),
    ("gated_gelu 1x16384x3072 approximate", "1x16384x3072 approximate: 0.191 ms, 0.99 of the floor, 0.30 GB"),
    ("gated_gelu 1x16384x3072 exact", "1x16384x3072 exact: 0.216 ms, 0.87 of the floor, 0.30 GB"),
    ("rotary 16384x16x64", "16384x16x64: 0.076 ms, 0.89 of the floor, 0.13 GB"),
    ("rotary 16384x8x64", "16384x8x64: 0.043 ms, 0.82 of the floor, 0.07 GB"),
    ("rotary 16384x16x64 interleaved", "16384x16x64 interleaved: 0.075 ms, 0.89 of the floor, 0.13 GB"),
    ("norm_rotary 16384x8x64 normed", "16384x8x64 normed: 0.164 ms, 0.79 of the floor, 0.24 GB"),
    ("norm_rotary 16384x8x64 rotated", "16384x8x64 rotated: 0.122 ms, 1.06 of the floor, 0.23 GB"),
    ("token_logp 4096x151936 open", "4096x151936 open: 1.131 ms, 0.77 of the floor, 1.24 GB"),
    ("token_logp 2048x151936 truncated", "2048x151936 truncated: 0.579 ms, 0.76 of the floor, 0.62 GB"),
    ("linear_token_logp 4096x1024x151936 plain", "4096x1024x151936 plain: 8.322 ms, 0.59 of the floor, 0.64 GB"),
    ("linear_token_logp 16384x1024x151936 plain", "16384x1024x151936 plain: 35.972 ms, 0.54 of the floor, 0.68 GB"),
    ("linear_token_loss 4096x1024x151936 plain", "4096x1024x151936 plain: 5.844 ms, 0.86 of the floor, 1.28 GB"),
    ("linear_token_loss 16384x1024x151936 plain", "16384x1024x151936 plain: 24.652 ms, 0.80 of the floor, 1.30 GB"),
    (
        "linear_token_loss 2048 rows at once, in a row",
        "2048 rows at once, in a row: 25.499 ms, 0.76 of the floor, 1.30 GB",
    ),
    (
        "linear_token_loss 2048 rows at once, after rests",
        "2048 rows at once, after rests: 21.993 ms, 0.89 of the floor, 1.30 GB",
    ),
    (
        "linear_token_loss 1024 rows at once, in a row",
        "1024 rows at once, in a row: 26.342 ms, 0.74 of the floor, 1.00 GB",
    ),
    (
        "linear_token_loss 1024 rows at once, after rests",
        "1024 rows at once, after rests: 24.179 ms, 0.81 of the floor, 1.00 GB",
    ),
    ("attention 4 x 4096", "4 x 4096: 1.946 ms, 494 TFLOP/s, 0.47 GB"),
    ("attention 16 x 1024", "16 x 1024: 0.750 ms, 321 TFLOP/s, 0.47 GB"),
    ("attention ragged, 16384 in all", "ragged, 16384 in all: 1.703 ms, 353 TFLOP/s, 0.21 GB"),
    (
        "attention 8x2x128x4096x3000x900x196 cap 50, forward",
        "8x2x128x4096x3000x900x196 cap 50, forward: 0.316 ms, 345 TFLOP/s, 0.03 GB",
    ),
    (
        "attention 8x2x128x4096x3000x900x196 cap 50, backward",
        "8x2x128x4096x3000x900x196 cap 50, backward: 0.883 ms, 309 TFLOP/s, 0.07 GB",
    ),
    (
        "attention 8x2x128x4096x4096 window 1024, forward",
        "8x2x128x4096x4096 window 1024, forward: 0.168 ms, 357 TFLOP/s, 0.03 GB",
    ),
    (
        "attention 8x2x128x4096x4096 window 1024, backward",
        "8x2x128x4096x4096 window 1024, backward: 0.504 ms, 298 TFLOP/s, 0.07 GB",
    ),
    (
        "attention 4x2x256x4096x2048x2048 window 1024 cap 50, forward",
        "4x2x256x4096x2048x2048 window 1024 cap 50, forward: 0.175 ms, 319 TFLOP/s, 0.03 GB",
    ),
    (
        "attention 4x2x256x4096x2048x2048 window 1024 cap 50, backward",
        "4x2x256x4096x2048x2048 window 1024 cap 50, backward: 0.813 ms, 172 TFLOP/s, 0.07 GB",
    ),
    ("attention 4x2x256x4096x2048x2048, forward", "4x2x256x4096x2048x2048, forward: 0.226 ms, 457 TFLOP/s, 0.03 GB"),
    ("attention 4x2x256x4096x2048x2048, backward", "4x2x256x4096x2048x2048, backward: 1.108 ms, 233 TFLOP/s, 0.07 GB"),
    ("attention 4x4x64x2048x2048 cap 30, forward", "4x4x64x2048x2048 cap 30, forward: 0.090 ms, 191 TFLOP/s, 0.01 GB"),
    (
        "attention 4x4x64x2048x2048 cap 30, backward",
        "4x4x64x2048x2048 cap 30, backward: 0.291 ms, 148 TFLOP/s, 0.01 GB",
    ),
    ("symmetric_product 28x1024x3072 alone", "28x1024x3072 alone: 0.202 ms, 895 TFLOP/s, 0.06 GB"),
    ("symmetric_product 28x1024x1024 added", "28x1024x1024 added: 0.118 ms, 508 TFLOP/s, 0.06 GB"),
    ("symmetric_product 1x4096x4096 alone", "1x4096x4096 alone: 0.137 ms, 1000 TFLOP/s, 0.03 GB"),
)
"""Labels and lines."""
