"""Returns and advantages of single tokens: generalised advantage estimation (arXiv 1506.02438) and what goes with it.

Everything is [B, T] with a mask of the response tokens. Tokens outside the mask (padding, what a tool said, the turns
of others) are passed over as if they were not there: values and advantages go from one response token to the next.
"""

from __future__ import annotations

import torch

from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.record import shown
from areno_fn.steps.reduce import wide

LEAST_SPREAD = 1e-6
"""A standard deviation that is not larger is that of equal numbers, and is not divided by."""


@checked
def terminal_rewards(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The reward of every sequence on its last response token, 0 on all others.

    Args:
        scores: floating [B].
        mask: bool [B, T].

    Returns:
        float32 [B, T] (float64 for float64 scores); a row without a response token is 0.

    Raises:
        RecordError: there is not one score a row, the mask is not bool, or scores are not floating data.
    """
    _check_mask("terminal_rewards", mask)
    _check_data("terminal_rewards", scores=scores)
    if mask.ndim != 2 or scores.shape != mask.shape[:1]:
        raise RecordError(
            f"terminal_rewards takes scores [B] and mask [B, T], received {tuple(scores.shape)} and {tuple(mask.shape)}"
        )
    left = mask.long().flip(1).cumsum(1).flip(1)  # response tokens from here on
    return torch.where(mask & (left == 1), wide(scores)[:, None], 0.0)


@checked
def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimates and returns, over response tokens only.

        delta_t = r_t + gamma V_(t+1) - V_t
        A_t = delta_t + gamma lam A_(t+1)
        R_t = A_t + V_t

    where t + 1 is the next response token of the row; behind the last one V and A are 0. With values of 0 and
    gamma = lam = 1 the returns are rewards to go. Computed in float64.

    Args:
        rewards: floating [B, T], data; what stands outside the mask never enters, so put a terminal reward on the last
            response token (`terminal_rewards`).
        values: floating [B, T], data.
        mask: bool [B, T].
        gamma: discount of a token.
        lam: weight of longer estimates, 0 for one step and 1 for the whole return.

    Returns:
        Advantages and returns, float32 [B, T] each (float64 for float64 values), 0 outside the mask.

    Raises:
        RecordError: the shapes differ, the mask is not bool, or rewards or values are not floating data.
    """
    _check_mask("gae", mask)
    _check_data("gae", rewards=rewards, values=values)
    if mask.ndim != 2 or not rewards.shape == values.shape == mask.shape:
        raise RecordError(
            f"gae takes rewards, values and mask of one shape [B, T], "
            f"received {tuple(rewards.shape)}, {tuple(values.shape)} and {tuple(mask.shape)}"
        )
    reward, value = (torch.where(mask, x.double(), 0.0) for x in (rewards, values))
    advantage = torch.zeros_like(value)
    next_value = next_advantage = value.new_zeros(value.shape[0])
    for t in reversed(range(mask.shape[1])):
        here = mask[:, t]
        delta = reward[:, t] + gamma * next_value - value[:, t]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, value[:, t], next_value)
        advantage[:, t] = torch.where(here, next_advantage, 0.0)
    dtype = torch.promote_types(values.dtype, torch.float32)
    return advantage.to(dtype), (advantage + value).to(dtype)


@checked
def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The values less their mean, over their population standard deviation, both over the mask alone.

    A spread of at most `LEAST_SPREAD` is not divided by. Give it all values of an update at once: parts whitened
    by themselves are not parts of the whole.

    Args:
        values: floating, any shape.
        mask: bool, the same shape.

    Returns:
        float32 of that shape (float64 for float64 values), 0 outside the mask.

    Raises:
        RecordError: the shapes differ, the mask is not bool, or values are not floating data.
    """
    _check_alike("whiten", mask, values=values)
    exact = torch.where(mask, values.double(), 0.0)
    count = mask.sum().clamp(min=1)
    deviation = torch.where(mask, exact - exact.sum() / count, 0.0)
    spread = (deviation.square().sum() / count).sqrt()
    scaled = deviation / torch.where(spread > LEAST_SPREAD, spread, 1.0)
    return scaled.to(torch.promote_types(values.dtype, torch.float32))


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """1 - var(returns - values) / var(returns) over the mask: 1 for a perfect critic, 0 for a constant one.

    Returns that are all equal have nothing to explain, and give 0.

    Args:
        values: floating, any shape, data.
        returns: floating, the same shape, data.
        mask: bool, the same shape.

    Raises:
        RecordError: the shapes differ, the mask is not bool, or values or returns are not floating data.
    """
    _check_alike("explained_variance", mask, values=values, returns=returns)
    target = returns[mask].double()
    total = target.var(correction=0) if target.numel() else target.new_zeros(())
    if total <= LEAST_SPREAD**2:
        return 0.0
    return float(1 - (target - values[mask].double()).var(correction=0) / total)


def _check_alike(who: str, mask: torch.Tensor, **data: torch.Tensor) -> None:
    _check_mask(who, mask)
    _check_data(who, **data)
    for name, values in data.items():
        if values.shape != mask.shape:
            raise RecordError(
                f"{who} takes {name} and mask of one shape, received {tuple(values.shape)} and {tuple(mask.shape)}"
            )


def _check_mask(who: str, mask: torch.Tensor) -> None:
    if mask.dtype != torch.bool:
        raise RecordError(f"{who} takes a mask of bool, received {shown(mask)}; write mask != 0")


def _check_data(who: str, **data: torch.Tensor) -> None:
    for name, values in data.items():
        if not values.is_floating_point():
            raise RecordError(f"{who} takes {name} of floating-point numbers, received {shown(values)}")
        if values.requires_grad:
            raise RecordError(f"{who} was given {name} with a gradient; they are data recorded before the update")
