"""Flow matching itself (arXiv 2210.02747, 2209.03003): the velocity error, as supervised fine-tuning minimises it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from areno_fn.contracts.actions import Sums
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.flow_batch import Velocities
from areno_fn.steps.flow.objectives.terms import seen, squared_error, summed

WEIGHTINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "velocity": torch.ones_like,
    "data": torch.square,
    "inverse_square": lambda sigma: sigma**-2,
    "cosmap": lambda sigma: 2 / (math.pi * (1 - 2 * sigma + 2 * sigma.square())),
}
"""What a squared velocity error is multiplied by at a level sigma."""


@checked
def velocity_matching(weighting: str = "velocity", *, snr_cap: float = 0.0) -> Callable[[Velocities], Sums]:
    r"""The stage `Velocities -> Sums` of w(sigma) mean (v - (eps - x0))^2, one term a row.

    | weighting | w |
    | --- | --- |
    | velocity | 1 |
    | data: the error of the clean latent | sigma^2 |
    | inverse_square, cosmap (SD3, arXiv 2403.03206) | sigma^-2, 2 / (pi (1 - 2 sigma + 2 sigma^2)) |

    With `snr_cap` the weight is further multiplied by min((1 - sigma)^2 / sigma^2, cap): with "data" it is how TDM
    (2503.06674) trains the model that follows the generator.

    Args:
        weighting: a key of `WEIGHTINGS`.
        snr_cap: 0 for none.

    Raises:
        SpecError: there is no such weighting, or the cap is negative.
    """
    if weighting not in WEIGHTINGS or not 0 <= snr_cap < math.inf:
        raise SpecError(
            f"velocity_matching takes a weighting among {', '.join(WEIGHTINGS)} and a finite snr_cap >= 0, "
            f"received {weighting!r} and {snr_cap}"
        )

    def stage(found: Velocities) -> Sums:
        now = seen(found, "velocity_matching")
        weight = WEIGHTINGS[weighting](now.batch.sigma)
        if snr_cap:
            weight = weight * ((1 - now.batch.sigma) / now.batch.sigma).square().clamp(max=snr_cap)
        error = squared_error(now.velocity, now.batch.target, now.batch.mask)
        return summed(weight * error, now.batch, velocity=now.velocity)

    return stage
