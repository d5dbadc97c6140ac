"""The last figures of `benchmarks/kernels.py`; written by it."""

from __future__ import annotations

DEVICE = "NVIDIA H200, torch 2.11.0+cu130, copy 4263 GB/s, matmul 817 TFLOP/s"

MEASURED = (
    ("rms_norm 1x131072x1024 plain", "1x131072x1024 plain: 0.341 ms, 0.92 of the floor, 0.54 GB"),
    ("rms_norm 16384x16x128 plain", "16384x16x128 plain: 0.101 ms, 0.78 of the floor, 0.13 GB"),
    ("rms_norm 1x16384x4096 zero centred", "1x16384x4096 zero centred: 0.182 ms, 0.87 of the floor, 0.28 GB"),
    ("add_rms_norm 1x16384x1024", "1x16384x1024: 0.088 ms, 0.80 of the floor, 0.14 GB"),
    ("add_rms_norm 1x131072x1024", "1x131072x1024: 0.595 ms, 0.95 of the floor, 1.08 GB"),
    ("gated_silu 1x16384x3072", "1x16384x3072: 0.192 ms, 0.99 of the floor, 0.30 GB"),
    ("gated_silu 1x4096x12288", "1x4096x12288: 0.200 ms, 0.94 of the floor, 0.30 GB"),
    ("gated_gelu 1x16384x3072 approximate", "1x16384x3072 approximate: 0.206 ms, 0.92 of the floor, 0.30 GB"),
    ("gated_gelu 1x16384x3072 exact", "1x16384x3072 exact: 0.256 ms, 0.74 of the floor, 0.30 GB"),
    ("rotary 16384x16x64", "16384x16x64: 0.076 ms, 0.89 of the floor, 0.13 GB"),
    ("rotary 16384x8x64", "16384x8x64: 0.043 ms, 0.83 of the floor, 0.07 GB"),
    ("rotary 16384x16x64 interleaved", "16384x16x64 interleaved: 0.075 ms, 0.89 of the floor, 0.13 GB"),
    ("norm_rotary 16384x8x64 normed", "16384x8x64 normed: 0.164 ms, 0.79 of the floor, 0.24 GB"),
    ("norm_rotary 16384x8x64 rotated", "16384x8x64 rotated: 0.123 ms, 1.05 of the floor, 0.23 GB"),
    ("token_logp 4096x151936 open", "4096x151936 open: 1.131 ms, 0.77 of the floor, 1.24 GB"),
    ("token_logp 2048x151936 truncated", "2048x151936 truncated: 0.579 ms, 0.76 of the floor, 0.62 GB"),
    ("linear_token_logp 4096x1024x151936 plain", "4096x1024x151936 plain: 7.965 ms, 0.59 of the floor, 0.64 GB"),
    ("linear_token_logp 16384x1024x151936 plain", "16384x1024x151936 plain: 35.252 ms, 0.54 of the floor, 0.68 GB"),
    ("linear_token_loss 4096x1024x151936 plain", "4096x1024x151936 plain: 6.261 ms, 0.77 of the floor, 1.26 GB"),
    ("linear_token_loss 16384x1024x151936 plain", "16384x1024x151936 plain: 26.093 ms, 0.72 of the floor, 1.29 GB"),
    ("attention 4 x 4096", "4 x 4096: 1.931 ms, 498 TFLOP/s, 0.47 GB"),
    ("attention 16 x 1024", "16 x 1024: 0.748 ms, 322 TFLOP/s, 0.47 GB"),
    ("attention ragged, 16384 in all", "ragged, 16384 in all: 2.571 ms, 234 TFLOP/s, 0.48 GB"),
    ("symmetric_product 28x1024x3072 alone", "28x1024x3072 alone: 0.201 ms, 898 TFLOP/s, 0.06 GB"),
    ("symmetric_product 28x1024x1024 added", "28x1024x1024 added: 0.118 ms, 509 TFLOP/s, 0.06 GB"),
    ("symmetric_product 1x4096x4096 alone", "1x4096x4096 alone: 0.135 ms, 1015 TFLOP/s, 0.03 GB"),
    (
        "attention 8x2x128x4096x3000x900x196 cap 50, forward",
        "8x2x128x4096x3000x900x196 cap 50, forward: 0.283 ms, 385 TFLOP/s, 0.03 GB",
    ),
    (
        "attention 8x2x128x4096x3000x900x196 cap 50, backward",
        "8x2x128x4096x3000x900x196 cap 50, backward: 0.890 ms, 307 TFLOP/s, 0.07 GB",
    ),
    (
        "attention 8x2x128x4096x4096 window 1024, forward",
        "8x2x128x4096x4096 window 1024, forward: 0.292 ms, 206 TFLOP/s, 0.03 GB",
    ),
    (
        "attention 8x2x128x4096x4096 window 1024, backward",
        "8x2x128x4096x4096 window 1024, backward: 0.748 ms, 201 TFLOP/s, 0.20 GB",
    ),
    (
        "attention 4x2x256x4096x2048x2048 window 1024 cap 50, forward",
        "4x2x256x4096x2048x2048 window 1024 cap 50, forward: 0.168 ms, 332 TFLOP/s, 0.03 GB",
    ),
    (
        "attention 4x2x256x4096x2048x2048 window 1024 cap 50, backward",
        "4x2x256x4096x2048x2048 window 1024 cap 50, backward: 0.816 ms, 171 TFLOP/s, 0.07 GB",
    ),
    ("attention 4x2x256x4096x2048x2048, forward", "4x2x256x4096x2048x2048, forward: 0.443 ms, 233 TFLOP/s, 0.03 GB"),
    ("attention 4x2x256x4096x2048x2048, backward", "4x2x256x4096x2048x2048, backward: 1.328 ms, 194 TFLOP/s, 0.20 GB"),
    ("attention 4x4x64x2048x2048 cap 30, forward", "4x4x64x2048x2048 cap 30, forward: 0.086 ms, 200 TFLOP/s, 0.01 GB"),
    (
        "attention 4x4x64x2048x2048 cap 30, backward",
        "4x4x64x2048x2048 cap 30, backward: 0.291 ms, 148 TFLOP/s, 0.01 GB",
    ),
)
"""Labels and lines."""
