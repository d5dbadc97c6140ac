"""`token_logp`: the log-probability of chosen tokens, and the entropy of what they were chosen from."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn.autodiff import custom_vjp
from areno_fn.kernels.backend import implementation, require
from areno_fn.kernels.token_logp import reference

__all__ = ["token_logp"]


def token_logp(
    logits: torch.Tensor, targets: torch.Tensor, *, entropic: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of categorical distributions given by logits.

    `logp_i = l[i, t_i] - log(sum_j exp(l[i, j]))` and `H_i = -sum_j p[i, j] log p[i, j]`, in float32 whatever the
    dtype of the logits (float64 for float64), relative to the largest logit of the row.

    A logit of -inf is a token that cannot be chosen: it adds nothing to the entropy and its gradient is 0. A row
    that is -inf throughout has logp -inf, entropy 0 and gradient 0.

    The gradient flows through `logp`, once, and through the entropy where that is asked for; else the entropy is a statistic
    without one. `dH_i / dl[i, j] = -p[i, j] (log p[i, j] + H_i)`.

    Args:
        logits: [M, V], any floating dtype, any strides.
        targets: int64 [M], each in [0, V). Outside it, the CPU raises and the GPU returns NaN.
        entropic: the entropy carries a gradient.

    Returns:
        logp [M] and entropy [M], float32 (float64 for float64 logits), in nats.

    Raises:
        KernelError: the shapes do not fit, V is 0, a dtype is wrong, or there is no kernel for the device.
    """
    fits = logits.ndim == 2 and logits.shape[1] > 0 and targets.shape == logits.shape[:1]
    fits = fits and logits.is_floating_point() and targets.dtype == torch.int64
    require(fits, "token_logp", "logits must be floating [M, V] with V > 0 and targets int64 [M]", logits, targets)
    logp, entropy, _, _ = (_entropic if entropic else _token_logp)(logits, targets)
    return logp, entropy


def _pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    dlogp, dentropy, _, _ = cotangents
    _, entropy, peak, log_sum = outputs
    return _backward(dlogp, dentropy, *inputs, entropy, peak, log_sum), None


def _pull_logp(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return _pull((cotangents[0], None, *cotangents[2:]), inputs, outputs)


def _rows_like(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return tuple(logits.new_empty(targets.shape, dtype=dtype) for _ in range(4))


_forward = implementation(
    "token_logp",
    "forward",
    "(Tensor logits, Tensor targets) -> (Tensor, Tensor, Tensor, Tensor)",
    reference.forward,
    _rows_like,
)
_backward = implementation(
    "token_logp",
    "backward",
    "(Tensor dlogp, Tensor? dentropy, Tensor logits, Tensor targets, Tensor entropy, Tensor peak, Tensor log_sum) -> Tensor",
    reference.backward,
    lambda dlogp, dentropy, logits, *rest: logits.new_empty(logits.shape),
)
_token_logp = custom_vjp(_forward, _pull_logp, constant_outputs=(1, 2, 3))
_entropic = custom_vjp(_forward, _pull, constant_outputs=(2, 3))
