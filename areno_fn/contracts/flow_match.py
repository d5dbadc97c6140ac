"""Records of distribution matching: a generator that few steps take from noise to data, and models that judge it."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.record import record, static
from areno_fn.contracts.shapes import require_latents, require_vectors


@record
class Judges:
    """The parameters of all roles, which a view puts together. Only the generator's are differentiated.

    Attributes:
        generator: of the student.
        real: of the teacher, frozen.
        fake: of the model that follows what the generator makes.
        surrogate: of the model that follows rewards; None where there is none.
    """

    generator: Any
    real: Any
    fake: Any
    surrogate: Any = None


@record
class Replay:
    """Steps of a rollout that the generator takes again, and where its result is noised to. Everything here is data.

    Attributes:
        state: [M, *], the stored state a step began at.
        sigma, timestep: float32 [M], of that state.
        middle: float32 [M], the level that part of the implied noise is kept from: the step's end for TDM, 0 for DMD2.
        level: float32 [M], the level the judges are asked at, above `middle`.
        noise: [M, *], fresh.
        conditions: of every step.
        weight: float32 [M].
        mask: bool [M, *], False where a latent is padding; None when nowhere.
        guidance: of the generator, as it was sampled.
        real_guidance: of the teacher.
    """

    state: torch.Tensor
    sigma: torch.Tensor
    timestep: torch.Tensor
    middle: torch.Tensor
    level: torch.Tensor
    noise: torch.Tensor
    conditions: Conditions
    weight: torch.Tensor
    mask: torch.Tensor | None = None
    guidance: float = static(default=1.0)
    real_guidance: float = static(default=1.0)

    def __check__(self) -> None:
        require_vectors(self, "sigma", "timestep", "middle", "level", "weight")
        require_latents(self, self.state, "noise", "mask")


@record
class Matched:
    """What a generator made, and the clean latents that judges see in its noised result.

    Attributes:
        generated: [M, *], the generator's clean latents, with gradient.
        real: [M, *], the teacher's, with guidance: data, as the following.
        fake: [M, *], of the model that follows the generator.
        plain: [M, *], the teacher's without guidance; None where it has none.
        surrogate: [M, *], of the model that follows rewards; None where there is none.
        weight: float32 [M].
        mask: bool [M, *], False where a latent is padding; None when nowhere.
        real_guidance: the guidance of `real`.
    """

    generated: torch.Tensor
    real: torch.Tensor
    fake: torch.Tensor
    weight: torch.Tensor
    plain: torch.Tensor | None = None
    surrogate: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    real_guidance: float = static(default=1.0)

    def __check__(self) -> None:
        require_vectors(self, "weight")
        require_latents(self, self.generated, "real", "fake", "plain", "surrogate", "mask")
