"""UniPC, a multistep predictor and corrector (arXiv 2302.04867), for the ODE of flow matching, in its B_2 form.

With lambda = log((1 - sigma) / sigma), h its increase over a step, and m the predicted clean latents, a step from s to t is

    x_t = sigma_t / sigma_s x_s + (1 - sigma_t) (1 - e^-h) (m_s + sum of rho_k (m_k - m_s) / r_k)

over earlier steps k with r_k = (lambda_k - lambda_s) / h. Before the next step the corrector takes it again with what the
model says at t, r = 1, among the m_k. Nothing is stored but what is passed on.
"""

from __future__ import annotations

import math

import torch

from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.flow import Schedule
from areno_fn.contracts.record import record
from areno_fn.steps.flow.schedule import TIMESTEPS, shifted
from areno_fn.steps.reduce import wide

BELOW_ONE = 1e-6


@record
class Memory:
    """What a multistep solver passes on.

    Attributes:
        before: the state that the last step began at, after its correction; empty before the first step.
        clean: predicted clean latents of the last steps, the newest last.
    """

    before: tuple[torch.Tensor, ...] = ()
    clean: tuple[torch.Tensor, ...] = ()


@checked
def unipc_schedule(steps: int, *, shift: float = 1.0) -> Schedule:
    """The levels of diffusers' UniPCMultistepScheduler with flow sigmas: the first a little below 1, whole timesteps.

    Raises:
        SpecError: a number is out of range.
    """
    if steps < 1 or not shift > 0:
        raise SpecError(f"a schedule needs steps >= 1 and shift > 0, received steps={steps}, shift={shift}")
    levels = shifted(torch.linspace(1.0, 1 / TIMESTEPS, steps + 1, dtype=torch.float64)[:-1], shift)
    levels[0] -= BELOW_ONE
    sigmas = torch.cat([levels, levels.new_zeros(1)]).float()
    return Schedule(sigmas=sigmas, timesteps=(levels * TIMESTEPS).floor().float())


def unipc_step(
    memory: Memory, state: torch.Tensor, velocity: torch.Tensor, schedule: Schedule, step: int, order: int = 2
) -> tuple[torch.Tensor, Memory]:
    """The next state [B, *] and what the following step must know. Orders fall to 1 at both ends of the schedule.

    Args:
        memory: `Memory()` before the first step.
        state: [B, *], the predicted state of this step, at which the model was asked.
        velocity: [B, *], its answer.
        schedule: its first level is below 1.
        step: in [0, T), counted up by 1 from call to call.
        order: 1 to 3.

    Raises:
        SpecError: the order is not 1 to 3, or the first level is 1.
    """
    sigmas = schedule.sigmas.tolist()
    if order not in (1, 2, 3) or not sigmas[0] < 1:
        raise SpecError(
            f"UniPC takes orders 1 to 3 and levels below 1, as unipc_schedule makes them, "
            f"received order {order} and a first level {sigmas[0]}"
        )
    state = wide(state)
    clean = state - sigmas[step] * wide(velocity)
    if memory.before:
        # the last steps use less than they know, but after them the state is not read: the data is the clean latent
        state = _step(memory.before[0], memory.clean, sigmas, step - 1, corrected=clean)
    history = (*memory.clean, clean)[-order:]
    reached = min(order, len(history), schedule.steps - step)
    after = _step(state, history[-reached:], sigmas, step)
    return after, Memory(before=(state,), clean=history)


def _step(
    state: torch.Tensor,
    clean: tuple[torch.Tensor, ...],
    sigmas: list[float],
    step: int,
    corrected: torch.Tensor | None = None,
) -> torch.Tensor:
    """One step from `step`, with the clean latents of it (the last) and of the steps before it, and perhaps of its end."""
    begin, end = sigmas[step], sigmas[step + 1]
    if end == 0:
        return clean[-1]
    here = _log_ratio(begin)
    h = _log_ratio(end) - here
    ratios = [(_log_ratio(sigmas[step - k]) - here) / h for k in range(1, len(clean))]
    others = list(reversed(clean[:-1]))
    if corrected is not None:
        ratios, others = [*ratios, 1.0], [*others, corrected]
    slope = clean[-1]
    for weight, ratio, other in zip(_weights(ratios, h), ratios, others, strict=True):
        slope = slope + weight / ratio * (other - clean[-1])
    return end / begin * state - (1 - end) * math.expm1(-h) * slope


def _weights(ratios: list[float], h: float) -> list[float]:
    """The rho that make the step exact for polynomials in lambda; with one ratio 1/2, as published code has it."""
    if len(ratios) < 2:
        return [0.5] * len(ratios)
    count, growth = len(ratios), math.expm1(-h)
    right, moment, factorial = [], growth / -h - 1, 1
    for i in range(1, count + 1):
        right.append(moment * factorial / growth)
        factorial *= i + 1
        moment = moment / -h - 1 / factorial
    powers = [[ratio**i for ratio in ratios] for i in range(count)]
    solved: list[float] = torch.linalg.solve(
        torch.tensor(powers, dtype=torch.float64), torch.tensor(right, dtype=torch.float64)
    ).tolist()
    return solved


def _log_ratio(sigma: float) -> float:
    return math.log((1 - sigma) / sigma)
