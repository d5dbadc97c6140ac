"""`adamw_update`: one update of all leaves by AdamW with float32 masters, every number read and written once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from areno_fn.kernels.adamw import reference
from areno_fn.kernels.backend import backend, require

__all__ = ["Factors", "Updated", "adamw_update"]

Leaves = Sequence[torch.Tensor]


class Factors(NamedTuple):
    """The numbers of an update, float32 [] each, on the device of the leaves, so that the host waits for none.

    Attributes:
        gradient: what gradients are multiplied with first, such as the factor of a clip.
        rate: the learning rate.
        bias_1, bias_2: `1 - b^t` of either moment.
    """

    gradient: torch.Tensor
    rate: torch.Tensor
    bias_1: torch.Tensor
    bias_2: torch.Tensor


class Updated(NamedTuple):
    """New tensors in the order of the leaves.

    Attributes:
        master: float32.
        mu, nu: the moments, float32.
        stored: the masters in the dtype of the parameters; the master itself where that is float32.
    """

    master: list[torch.Tensor]
    mu: list[torch.Tensor]
    nu: list[torch.Tensor]
    stored: list[torch.Tensor]


def adamw_update(
    gradients: Leaves,
    master: Leaves,
    mu: Leaves,
    nu: Leaves,
    stored: torch.dtype,
    decay: Sequence[float],
    factors: Factors,
    betas: tuple[float, float],
    eps: float,
) -> Updated:
    r"""The AdamW update of every leaf, in float32; arguments stay as they are.

        g <- gradient factor * g
        m <- b1 m + (1 - b1) g,    n <- b2 n + (1 - b2) g^2
        p <- p - rate (m / bias_1 / (sqrt(n / bias_2) + eps) + decay p)

    Args:
        gradients: floating leaves of one dtype and any shapes.
        master: float32, like the gradients in shape.
        mu, nu: like `master`.
        stored: dtype of the parameters that are made of the masters.
        decay: of each leaf.
        factors: the numbers of this update.
        betas: b1 and b2.
        eps: added to the root.

    Raises:
        KernelError: shapes or dtypes do not fit, or there is no kernel for the device.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2; Kingma and Ba, "Adam", 2015.
    """
    for g, *states in zip(gradients, master, mu, nu, strict=True):
        fits = g.is_floating_point() and g.dtype == gradients[0].dtype
        fits = fits and all(x.shape == g.shape and x.dtype == torch.float32 for x in states)
        require(
            fits,
            "adamw",
            "gradients must share a floating dtype, and master, mu and nu be float32 like them",
            g,
            *states,
        )
    if not gradients:
        return Updated([], [], [], [])
    args = (gradients, master, mu, nu, stored, decay, factors, betas, eps)
    if backend("adamw", *gradients, *master, *mu, *nu) == "reference":
        return Updated(*reference.update(*args))
    from areno_fn.kernels.adamw import triton

    return Updated(*triton.update(*args))
