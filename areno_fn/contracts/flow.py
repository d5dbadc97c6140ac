"""Records of flow matching. Shape letters: B rows, T denoising steps, M decisions, * the shape of one latent.

A state at noise level sigma is x = (1 - sigma) x0 + sigma eps, the velocity points towards noise, v = eps - x0, and
sampling goes from sigma = 1 to sigma = 0. Latents of several components (video and sound) are one tensor [B, n]:
a mean over its elements weighs each component by its number of elements.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import attrs
import torch

from areno_fn.contracts.calls import require_types
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.flow_policy import FlowPolicy as FlowPolicy
from areno_fn.contracts.flow_policy import straight as straight
from areno_fn.contracts.record import record, shown, static
from areno_fn.contracts.shapes import require_vectors

Dynamics = Literal["ode", "flow_sde", "dance_sde", "cps"]
Over = Literal["mean", "sum"]
Likelihood = Literal["gaussian", "unscaled"]
Solver = Literal["euler", "unipc"]


@attrs.frozen(kw_only=True)
class Process:
    """How latents are sampled: everything that training must repeat to score the same steps.

    Attributes:
        dynamics: a row of the table of `areno_fn.steps.flow.transition.transition`.
        guidance: weight of classifier-free guidance, at least 1; 1 asks the model once.
        over: whether a log-probability is the mean or the sum over the elements of a latent. The mean is what
            implementations use; the sum is the log-density.
        solver: "euler", or for the ODE "unipc" of second order, whose steps cannot be replayed one by one.
        likelihood: "gaussian", or "unscaled", -(x' - mean)^2, as published implementations score CPS.

    Raises:
        SpecError: a name does not exist, or the guidance is below 1.
    """

    dynamics: Dynamics = "flow_sde"
    guidance: float = 1.0
    over: Over = "mean"
    likelihood: Likelihood = "gaussian"
    solver: Solver = "euler"

    def __attrs_post_init__(self) -> None:
        for name, names in (("dynamics", Dynamics), ("over", Over), ("likelihood", Likelihood), ("solver", Solver)):
            if getattr(self, name) not in get_args(names):
                listed = ", ".join(get_args(names))
                raise SpecError(f"{name} {getattr(self, name)!r} does not exist; choose one of {listed}")
        require_types(self)
        if not self.guidance >= 1:
            raise SpecError(f"guidance must be at least 1, where 1 means none, received {self.guidance}")
        if self.solver != "euler" and self.dynamics != "ode":
            raise SpecError(f"the solver {self.solver!r} is for the dynamics 'ode', received {self.dynamics!r}")


@record
class Schedule:
    """The noise levels of a denoising loop.

    Attributes:
        sigmas: float32 [T + 1], falling.
        timesteps: float32 [T], what a model is told in the place of sigmas[:-1].
    """

    sigmas: torch.Tensor
    timesteps: torch.Tensor

    def __check__(self) -> None:
        if self.sigmas.ndim != 1 or self.sigmas.shape[0] < 2 or self.timesteps.shape != (self.sigmas.shape[0] - 1,):
            raise RecordError(
                f"a Schedule of T steps has sigmas [T + 1] and timesteps [T], "
                f"received {shown(self.sigmas)} and {shown(self.timesteps)}"
            )

    @property
    def steps(self) -> int:
        """T: how often the model is asked."""
        return int(self.timesteps.shape[0])


@record
class Interval:
    """One denoising step of every row.

    Attributes:
        sigma: float32 [B], the noise level the step begins at.
        next_sigma: float32 [B], the smaller one it ends at.
        ceiling: float32 [B], sigma, or the second level of the schedule where sigma is 1: Flow-SDE divides by 1 - ceiling.
        level: float32 [B], eta, how much noise the step adds; 0 for none.
        timestep: float32 [B], what the model is told.
    """

    sigma: torch.Tensor
    next_sigma: torch.Tensor
    ceiling: torch.Tensor
    level: torch.Tensor
    timestep: torch.Tensor

    def __check__(self) -> None:
        require_vectors(self, "sigma", "next_sigma", "ceiling", "level", "timestep")


@record
class Transition:
    """The Gaussian that the next state is drawn from.

    Attributes:
        mean: floating [B, *].
        std: floating [B], 0 for a step without noise; it never depends on parameters.
        velocity: floating [B, *], the (guided) velocity that the mean was made of.
        dynamics: how.
    """

    mean: torch.Tensor
    std: torch.Tensor
    velocity: torch.Tensor
    dynamics: Dynamics = static()

    def __check__(self) -> None:
        if self.mean.shape != self.velocity.shape or self.std.shape != self.mean.shape[:1]:
            raise RecordError(
                f"a Transition has a mean and a velocity of one shape and a std a row, received mean {shown(self.mean)}, "
                f"velocity {shown(self.velocity)}, std {shown(self.std)}"
            )


@record
class Conditions:
    """What every row is to be like.

    Attributes:
        positive: a tree of tensors [B, ...], as the model takes it.
        negative: a tree of the same structure and shapes, what guidance leads away from; None without guidance.
    """

    positive: Any
    negative: Any = None


@record
class FlowPrompts:
    """Conditions to be sampled for.

    Attributes:
        conditions: B of them.
        ids: int64 [B], the name of each; draws are functions of it, so it must not depend on the batch.
        mask: bool [B, *], False where a latent is padding, which stays 0 and is never scored; None when nowhere.
        begin: [B, *], clean latents that sampling begins near, noised to the first level of the schedule; None: it begins
            with noise alone.
    """

    conditions: Conditions
    ids: torch.Tensor
    mask: torch.Tensor | None = None
    begin: torch.Tensor | None = None

    def __check__(self) -> None:
        require_vectors(self, "ids")
        if self.ids.is_floating_point():
            raise RecordError(f"FlowPrompts.ids are whole numbers, the name of each prompt, received {shown(self.ids)}")


@record
class Trajectory:
    """Sampled latents, with the steps that training will score again. B rows = prompts x samples.

    Attributes:
        conditions: of every row.
        groups: int64 [B], rows with one number have the same prompt.
        ids: int64 [B], what the draws of a row were keyed by.
        final: [B, *], the last state, which is decoded.
        states: [B, S, *], the stored states, in the dtype that the loop went on with.
        logp: float32 [B, K], log-probabilities of the stored steps.
        schedule: the exact noise levels of the rollout.
        levels: float32 [T], eta of every step.
        mask: bool [B, *], False where a latent is padding; None when nowhere.
        process: how it was sampled.
        state_map: the place in `states` of states 0 .. T, -1 where one was not stored.
        transition_map: the place in `logp` of steps 0 .. T - 1, -1 where one was not stored.
    """

    conditions: Conditions
    groups: torch.Tensor
    ids: torch.Tensor
    final: torch.Tensor
    states: torch.Tensor
    logp: torch.Tensor
    schedule: Schedule
    levels: torch.Tensor
    mask: torch.Tensor | None = None
    process: Process = static()
    state_map: tuple[int, ...] = static()
    transition_map: tuple[int, ...] = static()

    def __check__(self) -> None:
        require_vectors(self, "groups", "ids")
        steps = self.schedule.steps
        if (len(self.state_map), len(self.transition_map)) != (steps + 1, steps):
            raise RecordError(
                f"a Trajectory of {steps} steps has {steps + 1} entries in state_map and {steps} in transition_map, "
                f"received {len(self.state_map)} and {len(self.transition_map)}"
            )

    def state(self, index: int) -> torch.Tensor:
        """State `index`, [B, *], of 0 (noise) to T.

        Raises:
            RecordError: it was not stored.
        """
        return self.states[:, self._place(self.state_map, index, "state")]

    def recorded(self, step: int) -> torch.Tensor:
        """The log-probability [B] of what step `step` drew.

        Raises:
            RecordError: it was not stored.
        """
        return self.logp[:, self._place(self.transition_map, step, "the log-probability of step")]

    def _place(self, table: tuple[int, ...], index: int, what: str) -> int:
        if not -len(table) <= index < len(table) or table[index] < 0:
            stored = [i for i, place in enumerate(table) if place >= 0]
            raise RecordError(f"{what} {index} was not stored; this Trajectory keeps {stored}")
        return table[index]
