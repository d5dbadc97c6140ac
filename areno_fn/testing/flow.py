"""The law of flow-matching policies: what sampling recorded is what training computes."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.flow import FlowPrompts, Process, Schedule, Trajectory
from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.key import Key
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.score import act_flow, denoising
from areno_fn.testing.sizes import require_some


def trajectory_matches_training(
    policy: FlowPolicy,
    params: Any,
    prompts: FlowPrompts,
    key: Key,
    process: Process,
    schedule: Schedule,
    levels: torch.Tensor,
    *,
    samples: int = 2,
    same: float = 0.0,
    tolerance: float = 1e-5,
) -> Trajectory:
    """The log-probability that a rollout recorded of a step is the one that training recomputes of it.

    In the batch of the rollout they differ by no more than `same`, row by row by no more than `tolerance`. Also draws every
    prompt alone: a sample must not depend on the batch that it was drawn in.

    Args:
        policy: the model's functions.
        params: its parameters.
        prompts: B prompts.
        key: names the draws.
        process: dynamics with noise, and guidance.
        schedule: the noise levels.
        levels: float32 [T], eta of every step.
        samples: latents a prompt.
        same: largest difference in the batch of the rollout; 0 on the CPU.
        tolerance: largest difference in another batch, of log-probabilities and of states.

    Returns:
        The trajectory that was checked.

    Raises:
        AssertionError: names the step, the row and both numbers.
        RecordError: no step has noise.
        ValueError: there is no prompt, or no sample of one.
    """
    made = prompts.ids.shape[0] * samples
    require_some(made, "no sample is drawn", "give trajectory_matches_training a prompt and samples of 1 at least")
    rollout, score = flow_sampler(policy, process), act_flow(policy)
    drawn: Trajectory = rollout(params, prompts, key, schedule, levels, samples=samples)
    advantages = torch.zeros(drawn.ids.shape[0], device=drawn.ids.device)
    for micro, most in ((None, same), (1, tolerance)):
        where = "in the batch of the rollout" if micro is None else "in a batch of its own"
        for batch in denoising(drawn, advantages, micro=micro):
            assert batch.old is not None, "steps with noise have a recorded log-probability"
            _close(score(params, batch).logp, batch.old, most, f"sigma {float(batch.interval.sigma[0]):.4f}", where)
    for row in range(prompts.ids.shape[0]):
        given = tree.map(lambda x, row=row: x[row : row + 1], prompts)
        alone: Trajectory = rollout(params, given, key, schedule, levels, samples=samples)
        part = slice(row * samples, (row + 1) * samples)
        for name in ("logp", "states", "final"):
            first, second = getattr(alone, name), getattr(drawn, name)[part]
            _close(
                first.flatten(1), second.flatten(1), tolerance, f"{name} of prompt {int(given.ids[0])}", "drawn alone"
            )
    return drawn


def _close(received: torch.Tensor, recorded: torch.Tensor, most: float, what: str, where: str) -> None:
    error = (received.float() - recorded.float()).abs().flatten()
    if not bool((error <= most).all()):
        worst = int(error.nan_to_num(torch.inf).argmax())
        raise AssertionError(
            f"{what}: element {worst} was recorded as {float(recorded.flatten()[worst]):.7f}, "
            f"but {where} it is {float(received.flatten()[worst]):.7f}"
        )
