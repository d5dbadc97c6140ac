"""Cases of `linear_token_loss`. Sizes are (M, D, V). The variant is the factor of the logits."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from areno_fn.kernels.law import Arguments, Case, Cases, Floor
from areno_fn.kernels.linear_token_logp import cases as later
from areno_fn.kernels.linear_token_loss import linear_token_loss


def build(case: Case, device: torch.device | str) -> Arguments:
    """What `linear_token_logp` is given, and the slopes of a loss in the log-probabilities, float32 [M]."""
    hidden, weight, targets, scale = later.build(case, device).positional
    dtype = torch.promote_types(case.dtype, torch.float32)
    slopes = case.lay(case.normal("slopes", case.sizes[0], device=device, dtype=dtype))
    # small cases have several parts all the same
    keywords = {} if case.sizes[2] > 10_000 else {"chunk": 2 * case.sizes[2]}
    return Arguments(positional=(hidden, weight, targets, slopes, scale), moving=(0, 1), keywords=keywords)


def function(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, slopes: torch.Tensor, scale: float, **chunk: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel on a loss that is linear in the log-probabilities."""

    def slope(first: int, logp: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        del entropy
        return slopes[first : first + logp.shape[0]]

    return linear_token_loss(hidden, weight, targets, slope, scale, **chunk)


def oracle(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    slopes: torch.Tensor,
    scale: float,
    chunk: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The formula; the lever is the loss less its value."""
    del chunk
    logp, entropy = later.oracle(hidden, weight, targets, scale)
    return (slopes * (logp - logp.detach())).sum(), logp, entropy


def noise(arguments: Arguments, cotangents: tuple[torch.Tensor, ...]) -> tuple[float, ...]:
    """That of `linear_token_logp`."""
    hidden, weight, targets, slopes, scale = arguments.positional
    rows = Arguments(positional=(hidden, weight, targets, scale), moving=(0, 1))
    return 0.0, *later.noise(rows, (slopes * cotangents[0],))


def forward_floor(case: Case) -> Floor:
    """Reads both, writes two numbers a row and both gradients: three products."""
    count, width, size = case.sizes
    moved = 2 * (count + size) * width * case.dtype.itemsize + count * 20
    return Floor(bytes=moved, flops=6 * count * width * size)


def backward_floor(case: Case) -> Floor:
    """Multiplies both gradients by a number."""
    count, width, size = case.sizes
    return Floor(bytes=2 * (count + size) * width * case.dtype.itemsize, flops=(count + size) * width)


CASES = Cases(
    name="linear_token_loss",
    function=function,
    oracle=oracle,
    answered=(0,),
    build=build,
    strategy=later.CASES.strategy,
    wide=(
        Case(sizes=(3, 40, 9001), dtype=torch.float32, variant="plain", magnitude=3.0, strided=True),
        Case(sizes=(300, 24, 500), dtype=torch.bfloat16, variant="warm", magnitude=3.0),
    ),
    hot=later.CASES.hot,
    tolerance=later.tolerance,
    noise=noise,
    forward_floor=forward_floor,
    backward_floor=backward_floor,
)


def entropic_build(case: Case, device: torch.device | str) -> Arguments:
    """What `build` makes, and slopes of the loss in the entropies."""
    made = build(case, device)
    *first, scale = made.positional
    dtype = torch.promote_types(case.dtype, torch.float32)
    bends = case.lay(case.normal("bends", case.sizes[0], device=device, dtype=dtype))
    return attrs.evolve(made, positional=(*first, bends, scale))


def entropic(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    slopes: torch.Tensor,
    bends: torch.Tensor,
    scale: float,
    **chunk: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel on a loss that is linear in log-probabilities and entropies."""

    def slope(first: int, logp: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        here = slice(first, first + len(entropy))
        return slopes[here], bends[here]

    return linear_token_loss(hidden, weight, targets, slope, scale, entropic=True, **chunk)


def entropic_oracle(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    slopes: torch.Tensor,
    bends: torch.Tensor,
    scale: float,
    chunk: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The formula; the lever is the loss less its value."""
    del chunk
    logp, entropy = later.entropic_oracle(hidden, weight, targets, scale)
    lever = (slopes * (logp - logp.detach())).sum() + (bends * (entropy - entropy.detach())).sum()
    return lever, logp, entropy


def entropic_noise(arguments: Arguments, cotangents: tuple[torch.Tensor, ...]) -> tuple[float, ...]:
    """That of `linear_token_logp`."""
    hidden, weight, targets, slopes, bends, scale = arguments.positional
    rows = Arguments(positional=(hidden, weight, targets, scale), moving=(0, 1))
    return 0.0, *later.noise(rows, (slopes * cotangents[0], bends * cotangents[0]))


ENTROPIC = attrs.evolve(
    CASES,
    function=entropic,
    oracle=entropic_oracle,
    build=entropic_build,
    noise=entropic_noise,
    hot=later.ENTROPIC.hot,
)
"""Those of a loss of entropies."""
