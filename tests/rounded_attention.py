"""Packed attention as a fused kernel in 16 bits forms it, in plain torch: what is stored is rounded, the rest is in float32.

As in Dao, "FlashAttention-2", 2023: the backward has the result as it was stored, and takes the product of that with its cotangent
for the sum of weights times their cotangents.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from areno_fn.kernels.attention import packed_attention
from areno_fn.kernels.attention.cases import CASES, build
from areno_fn.kernels.law import Case, cotangents_of, pulled

Round = Callable[[torch.Tensor], torch.Tensor]


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Float32 numbers as bfloat16 has them."""
    return x.bfloat16().float()


def cut_off(x: torch.Tensor) -> torch.Tensor:
    """Float32 numbers without the bits that bfloat16 has no place for, which is what Triton's interpreter makes of them."""
    return (x.contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32)


def errors(case: Case, device: str, narrow: Round) -> torch.Tensor:
    """Squared relative errors of result and gradients: the kernel's, the plain form's, and that form's with an exact delta.

    Returns:
        float64 [3, 4].
    """
    arguments = build(case, device)
    (dout,) = cotangents_of(CASES, case, arguments)
    q, k, v, layout, scale = arguments.positional
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    want = CASES.oracle(*wide, layout, scale, **arguments.keywords)
    wanted = [want.detach(), *torch.autograd.grad(want, wide, dout.double())]
    outputs, gradients = pulled(packed_attention, arguments, (0,), (dout,))
    edges = [0, *itertools.accumulate(case.sizes[3:])]
    rows = [slice(*pair) for pair in itertools.pairwise(edges)]
    cap = arguments.keywords["soft_cap"]
    found = [[*outputs, *gradients]]
    for exact in (False, True):
        parts = [_document(*(x[here].float() for x in (q, k, v, dout)), scale, cap, narrow, exact) for here in rows]
        found.append([torch.cat(side) for side in zip(*parts, strict=True)])
    return torch.tensor(
        [[_squared(got, want) for got, want in zip(each, wanted, strict=True)] for each in found], dtype=torch.float64
    )


def _squared(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).square().sum() / want.square().sum()).item()


def _document(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    scale: float,
    cap: float,
    narrow: Round,
    exact: bool,
) -> tuple[torch.Tensor, ...]:
    """Result and gradients of one document; an exact delta is formed from the result before it is rounded."""
    group = q.shape[1] // k.shape[1]
    q, dout = q.transpose(0, 1), dout.transpose(0, 1)
    k, v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    bent = torch.tanh(q @ k.mT * scale / cap)
    hidden = torch.ones_like(bent[0], dtype=torch.bool).triu(1)
    scores = (cap * bent).masked_fill(hidden, -torch.inf)
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    total = powers.sum(-1, keepdim=True)
    out = narrow(powers) @ v / total
    weights = powers / total
    delta = (dout * (out if exact else narrow(out))).sum(-1, keepdim=True)
    slopes = narrow(weights * (1 - bent.square()) * (dout @ v.mT - delta))
    dk, dv = (x.unflatten(0, (-1, group)).sum(1) for x in (slopes.mT @ q * scale, narrow(weights).mT @ dout))
    return tuple(narrow(x).transpose(0, 1) for x in (out, slopes @ k * scale, dk, dv))
