"""`norm_rotary`: the queries and keys of a fused projection, normalised per head and rotated, in one pass."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn.autodiff import custom_vjp
from areno_fn.kernels.backend import implementation, require
from areno_fn.kernels.norm_rotary import reference

__all__ = ["backward", "fit_together", "forward", "norm_rotary"]


def norm_rotary(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary(rms_norm(x, w), cos, sin)` of the first heads of a projection that holds queries, keys and values.

    Without a weight the heads are rotated as they are. The values are not read and have gradient 0 from here.
    Differentiable in `qkv` and both weights, once; the angles are constants.

    Args:
        qkv: [N, H + 2 K, head_dim], floating, in the order q, k, v.
        q_weight: [head_dim], or None for both.
        k_weight: like `q_weight`.
        cos: float32 [N, head_dim / 2].
        sin: like `cos`.
        heads: H.
        eps: added to the mean square.

    Returns:
        Queries [N, H, head_dim] and keys [N, K, head_dim] in the dtype of `qkv`.

    Raises:
        KernelError: the shapes or dtypes do not fit, or there is no kernel for the device.
    """
    weights = [w for w in (q_weight, k_weight) if w is not None]
    wanted = (
        "qkv must be floating [N, H + 2 K, head_dim], cos and sin [N, head_dim / 2], and the weights both [head_dim] "
        f"or both None, with H = {heads}"
    )
    fits = fit_together(qkv, weights, cos, sin, heads)
    require(fits, "norm_rotary", wanted, qkv, cos, sin, *weights)
    q, k = _norm_rotary(qkv, q_weight, k_weight, cos, sin, heads, eps)
    return q, k


def fit_together(
    qkv: torch.Tensor, weights: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, heads: int
) -> bool:
    """Whether queries, keys and values of so many heads are there, and weights, both or none, and angles for them."""
    fits = qkv.ndim == 3 and qkv.is_floating_point() and 0 < heads < qkv.shape[1] and (qkv.shape[1] - heads) % 2 == 0
    fits = fits and qkv.shape[2] > 0 and qkv.shape[2] % 2 == 0
    fits = fits and cos.shape == sin.shape == (qkv.shape[0], qkv.shape[2] // 2)
    return fits and len(weights) != 1 and all(w.shape == qkv.shape[2:] for w in weights)


def _pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    del outputs
    qkv, q_weight, k_weight, cos, sin, _, eps = inputs
    dq, dk = cotangents
    dqkv, dq_weight, dk_weight = backward(dq, dk, None, qkv, q_weight, k_weight, cos, sin, eps)
    if q_weight is None:
        return dqkv, None, None, None, None, None, None
    return dqkv, dq_weight, dk_weight, None, None, None, None


def _heads_like(qkv: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, heads: int, eps: float) -> Any:
    count, rows, size = qkv.shape
    return qkv.new_empty(count, heads, size), qkv.new_empty(count, (rows - heads) // 2, size)


def _gradients_like(
    dq: Any, dk: Any, dv: Any, qkv: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, eps: float
) -> Any:
    weights = (qkv.new_empty(0) if w is None else w.new_empty(w.shape) for w in (q_weight, k_weight))
    return qkv.new_empty(qkv.shape), *weights


forward = implementation(
    "norm_rotary",
    "forward",
    "(Tensor qkv, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, int heads, float eps) -> (Tensor, Tensor)",
    reference.forward,
    _heads_like,
)
"""`norm_rotary` itself, without a derivative, for primitives that contain it."""

backward = implementation(
    "norm_rotary",
    "backward",
    "(Tensor dq, Tensor dk, Tensor? dv, Tensor qkv, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, "
    "float eps) -> (Tensor, Tensor, Tensor)",
    reference.backward,
    _gradients_like,
)
"""`(dq, dk, dv or None, qkv, ...) -> (dqkv, dq_weight, dk_weight)`, where dv is copied behind the other two."""

_norm_rotary = custom_vjp(forward, _pull, keep_outputs=False)
