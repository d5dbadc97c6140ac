"""Batches of flow matching and what models say of them. M decisions or noised samples, * the shape of one latent."""

from __future__ import annotations

import torch

from areno_fn.contracts.actions import Actions
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.flow import Conditions, FlowPrompts, Interval, Process, Trajectory, Transition
from areno_fn.contracts.record import record, shown, static
from areno_fn.contracts.shapes import require_latents, require_vectors


@record
class Clean:
    """Rows of data for a flow model.

    Attributes:
        latents: [B, *].
        prompts: what each is of, and its name.
    """

    latents: torch.Tensor
    prompts: FlowPrompts


@record
class EachReward:
    """What every reward says of B rows. K rewards.

    Attributes:
        values: float32 [B, K]; 0 where a reward does not apply.
        weights: float32 [K].
        applies: bool [B, K].
    """

    values: torch.Tensor
    weights: torch.Tensor
    applies: torch.Tensor

    def __check__(self) -> None:
        fits = self.values.ndim == 2 and self.weights.shape == self.values.shape[1:]
        if not fits or self.applies.shape != self.values.shape:
            raise RecordError(
                f"EachReward has values [B, K], weights [K] and applies [B, K], received {shown(self.values)}, "
                f"{shown(self.weights)} and {shown(self.applies)}"
            )


@record
class JudgedTrajectory:
    """Sampled latents and what they are worth.

    Attributes:
        rollout: B rows.
        rewards: float32 [B], the weighted sum of all rewards.
        each: the rewards one by one; None where only the sum is known.
    """

    rollout: Trajectory
    rewards: torch.Tensor
    each: EachReward | None = None

    def __check__(self) -> None:
        require_vectors(self, "rewards")


@record
class Denoising:
    """Recorded denoising steps, to be scored again. Everything here is data.

    Attributes:
        state, taken: [M, *], the state a step began at and the one it drew.
        interval: the exact noise levels of every step.
        conditions: of every step.
        old: float32 [M], the recorded log-probabilities; None for steps without noise.
        advantage, weight: float32 [M].
        segments: int64 [M], the row of this batch that a step belongs to, in [0, documents).
        mask: bool [M, *], False where a latent is padding; None when nowhere.
        before: the transitions under the parameters that drew, where an objective asks for them.
        reference: the transitions under a frozen reference, or a teacher.
        documents: number of rows.
        process: how the steps were sampled.
    """

    state: torch.Tensor
    taken: torch.Tensor
    interval: Interval
    conditions: Conditions
    old: torch.Tensor | None
    advantage: torch.Tensor
    weight: torch.Tensor
    segments: torch.Tensor
    mask: torch.Tensor | None = None
    before: Transition | None = None
    reference: Transition | None = None
    documents: int = static()
    process: Process = static()

    def __check__(self) -> None:
        require_vectors(self, "old", "advantage", "weight", "segments")
        require_latents(self, self.state, "taken", "mask")


@record
class Moves:
    """Denoising steps under the current parameters, beside what was recorded of them.

    Attributes:
        now: the transitions, with gradient.
        actions: their log-probabilities as numbers per decision, as any policy-gradient loss takes them; None for
            steps without noise.
        batch: the data.
    """

    now: Transition
    actions: Actions | None
    batch: Denoising


@record
class Noised:
    """Clean latents that were noised to one level each. Everything here is data, and every model is asked about the same.

    Attributes:
        state: [M, *], (1 - sigma) x0 + sigma eps.
        target: [M, *], the velocity eps - x0.
        sigma, timestep: float32 [M].
        conditions: of every row.
        weight: float32 [M], what a row counts for in the mean.
        factor: float32 [M], multiplies a row's loss without counting in the denominator; None for 1.
        advantage: float32 [M].
        groups: int64 [M], rows with one number are compared with each other.
        mask: bool [M, *], False where a latent is padding; None when nowhere.
        old, reference, average: [M, *], the velocities of the policy that sampled, of a frozen reference and of a
            running average, where an objective asks for them.
        guidance: weight of classifier-free guidance while training.
    """

    state: torch.Tensor
    target: torch.Tensor
    sigma: torch.Tensor
    timestep: torch.Tensor
    conditions: Conditions
    weight: torch.Tensor
    factor: torch.Tensor | None = None
    advantage: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    average: torch.Tensor | None = None
    guidance: float = static(default=1.0)

    def __check__(self) -> None:
        require_vectors(self, "sigma", "timestep", "weight", "factor", "advantage", "groups")
        require_latents(self, self.state, "target", "mask", "old", "reference", "average")


@record
class Velocities:
    """What the current parameters say of noised samples.

    Attributes:
        velocity: [M, *], with gradient.
        batch: the data.
    """

    velocity: torch.Tensor
    batch: Noised

    def __check__(self) -> None:
        require_latents(self, self.batch.state, "velocity")
