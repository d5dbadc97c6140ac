"""`adamw_update`: one update of all leaves by AdamW, every number read and written once; in new memory or in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from areno_fn.kernels.adamw import reference
from areno_fn.kernels.backend import backend, require

__all__ = ["Factors", "Updated", "adamw_update", "adamw_update_in_place"]

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
        master, mu, nu: in the dtypes of those before.
        stored: the masters in the dtype of the parameters; the master itself where it has that.
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
    r"""The AdamW update of every leaf, computed in float32; arguments stay as they are.

        g <- gradient factor * g
        m <- b1 m + (1 - b1) g,    n <- b2 n + (1 - b2) g^2
        p <- p - rate (m / bias_1 / (sqrt(n / bias_2) + eps) + decay p)

    Args:
        gradients: floating leaves of one dtype and any shapes.
        master: float32, like the gradients in shape; or, without masters, the parameters in the dtype `stored`.
        mu, nu: like `master`, in shape and dtype.
        stored: dtype of the parameters that are made of the masters.
        decay: of each leaf.
        factors: the numbers of this update.
        betas: b1 and b2.
        eps: added to the root.

    Raises:
        KernelError: shapes or dtypes do not fit, or there is no kernel for the device.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2; Kingma and Ba, "Adam", 2015.
    """
    _require_fits(gradients, master, mu, nu, [stored] * len(master))
    if not gradients:
        return Updated([], [], [], [])
    args = (gradients, master, mu, nu, stored, decay, factors, betas, eps)
    if backend("adamw", *gradients, *master, *mu, *nu) == "reference":
        return Updated(*reference.update(*args))
    from areno_fn.kernels.adamw import triton

    return Updated(*triton.update(*args))


def adamw_update_in_place(
    gradients: Leaves,
    master: Leaves,
    mu: Leaves,
    nu: Leaves,
    stored: Leaves,
    decay: Sequence[float],
    factors: Factors,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """`adamw_update`, whose results are written to `master`, `mu`, `nu` and `stored`, bit for bit the same.

    Args:
        gradients: as for `adamw_update`; they are not written to.
        master, mu, nu: as for `adamw_update`, each contiguous in memory of its own.
        stored: the parameters, of one dtype; the tensors of `master` themselves where they are their own masters.
        decay, factors, betas, eps: as for `adamw_update`.

    Raises:
        KernelError: as `adamw_update`; or a leaf that is written to is not contiguous.
    """
    _require_fits(gradients, master, mu, nu, [x.dtype for x in stored])
    for leaves in (master, mu, nu, stored):
        for x in leaves:
            require(x.is_contiguous(), "adamw", "what is updated in place must be contiguous", x)
    if not gradients:
        return
    args = (gradients, master, mu, nu, stored, decay, factors, betas, eps)
    if backend("adamw", *gradients, *master, *mu, *nu, *stored) == "reference":
        reference.update_in_place(*args)
        return
    from areno_fn.kernels.adamw import triton

    triton.update_in_place(*args)


def _require_fits(gradients: Leaves, master: Leaves, mu: Leaves, nu: Leaves, stored: Sequence[torch.dtype]) -> None:
    for g, p, m, n, own in zip(gradients, master, mu, nu, stored, strict=True):
        fits = g.is_floating_point() and g.dtype == gradients[0].dtype and own == stored[0]
        fits = fits and p.dtype == master[0].dtype and p.dtype in (torch.float32, own)
        fits = fits and all(x.shape == g.shape and x.dtype == p.dtype for x in (p, m, n))
        require(
            fits,
            "adamw",
            "gradients must share a floating dtype, and master, mu and nu be float32 like them, or be all in the dtype of the "
            "parameters",
            g,
            p,
            m,
            n,
        )
