"""Rotary position embedding: which angle a pair of channels turns by from one position to the next."""

from __future__ import annotations

import math

import attrs
import torch

from areno_fn.contracts.errors import ModelError

TYPES = ("default", "linear", "llama3", "yarn")
"""The rotary types that exist here, by the names Hugging Face gives them."""


@attrs.frozen(kw_only=True)
class Rope:
    """How rotary angles are spaced. Fields that a type does not use keep their defaults.

    Attributes:
        type: `default`, `linear`, `llama3` or `yarn`.
        theta: base of the geometric sequence of frequencies.
        factor: how many times longer the context is than the one pretraining used (`linear`, `llama3`, `yarn`).
        original_positions: context length of pretraining (`llama3`, `yarn`).
        low_freq_factor, high_freq_factor: bounds of the blended band, in turns per original context (`llama3`).
        beta_fast, beta_slow: the same for `yarn`, from the fast side to the slow side.
        attention_factor: scale of cosines and sines (`yarn`); found from `factor` when `None`.
        mscale, mscale_all_dim: when both are given and `attention_factor` is not, they shape it (`yarn`).
        truncate: round the bounds of the band outwards to whole channels (`yarn`).
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __attrs_post_init__(self) -> None:
        if self.type not in TYPES:
            raise ModelError(f"rope type {self.type!r} is not supported; the supported ones are {', '.join(TYPES)}")


def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device | None = None) -> tuple[torch.Tensor, float]:
    """The angle per position of every pair of channels, and the scale of cosines and sines.

    Args:
        rope: the spacing.
        head_dim: channels of a head, even.
        device: where the result lies.

    Returns:
        float32 [head_dim / 2], in the order of operations of transformers, so that the same bits come out;
        and the attention scaling, 1.0 for all types but `yarn`.

    Sources:
        Su et al., "RoFormer", 2021 (default); Chen et al., "Extending Context Window via Position
        Interpolation", 2023 (linear); Llama 3.1 model card (llama3); Peng et al., "YaRN", 2023 (yarn).
    """
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    if rope.type == "linear":
        return (1.0 / powers) / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(rope, 1.0 / powers), 1.0
    if rope.type == "yarn":
        return _yarn(rope, powers, head_dim), _yarn_scale(rope)
    return 1.0 / powers, 1.0


def _llama3(rope: Rope, frequency: torch.Tensor) -> torch.Tensor:
    """Fast pairs are kept, slow ones divided by the factor, and those between are blended by their wavelength."""
    wavelength = 2 * math.pi / frequency
    longest_kept = rope.original_positions / rope.high_freq_factor
    shortest_divided = rope.original_positions / rope.low_freq_factor
    turns = rope.original_positions / wavelength
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * frequency / rope.factor + smooth * frequency
    slow = torch.where(wavelength > shortest_divided, frequency / rope.factor, blended)
    return torch.where(wavelength < longest_kept, frequency, slow)


def _yarn(rope: Rope, powers: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Pairs below the band are kept, those above divided by the factor, with a linear ramp between."""
    low, high = yarn_band(rope, head_dim)
    width = high - low if high != low else 0.001  # an empty band is a step, not a division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device=powers.device) - low) / width).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def yarn_band(rope: Rope, head_dim: int) -> tuple[float, float]:
    """First and last channel pair of yarn's ramp: those that make `beta_fast` and `beta_slow` turns."""

    def pair(turns: float) -> float:
        return head_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, head_dim - 1)


def _yarn_scale(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
