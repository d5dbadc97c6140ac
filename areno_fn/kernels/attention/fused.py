"""Packed attention forward and backward by torch's fused kernels on the GPU, for primitives that contain it.

Documents of one length go to cuDNN's kernel on chips that prefer it (compute capability 9.0 and later); documents
of several lengths, laid end to end, to the variable-length flash kernel, which pads nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from areno_fn.autodiff import custom_vjp
from areno_fn.kernels.attention.layout import PackedLayout

CUDNN_WIDEST, FLASH_WIDEST, EVEN = 128, 256, 8
"""The widest heads of either kernel, and what their width is a multiple of."""
CUDNN_SHORTEST = 64
"""The shortest documents that are given to cuDNN, which refuses some lengths below."""


def takes(x: torch.Tensor, head_dim: int) -> bool:
    """Whether these kernels take heads like `x` in dtype and device: half precision on the GPU, outside a traced graph."""
    low = x.dtype in (torch.bfloat16, torch.float16)
    fits = head_dim <= FLASH_WIDEST and head_dim % EVEN == 0
    return x.is_cuda and low and fits and not torch.compiler.is_compiling()


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float
) -> tuple[torch.Tensor, ...]:
    """The result [N, H, head_dim], and the tensors beside it that `backward` needs; arguments as `packed_attention`'s."""
    longest = layout.longest
    if dense(q, layout):
        sides = (_beside(x, layout) for x in (q, k, v))
        out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *sides, None, True, 0.0, True, False, scale=scale
        )
        return _end_to_end(out), lse, seed, offset
    edges = _edges(q, layout)
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, edges, edges, longest, longest, 0.0, True, False, scale=scale
    )
    return out, lse, state, unused


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: tuple[torch.Tensor, ...],
    layout: PackedLayout,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cotangents of q, k and v, [N, .., head_dim] each; `kept` is what `forward` returned."""
    out, lse, state, other = kept
    longest = layout.longest
    if dense(q, layout):
        sides = (_beside(x, layout) for x in (dout, q, k, v, out))
        pulled = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *sides, lse, state, other, None, None, None, longest, longest, 0.0, True, scale=scale
        )
        dq, dk, dv = (_end_to_end(x) for x in pulled)
        return dq, dk, dv
    edges = _edges(q, layout)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dout.contiguous(), q, k, v, out, lse, edges, edges, longest, longest, 0.0, True, state, other, scale=scale
    )
    return dq, dk, dv


def dense(q: torch.Tensor, layout: PackedLayout) -> bool:
    """Whether cuDNN's kernel is the one: documents of one length that are long enough, and heads narrow enough."""
    if not q.is_cuda or layout.edges is not None or layout.longest < CUDNN_SHORTEST or q.shape[-1] > CUDNN_WIDEST:
        return False
    return torch.cuda.get_device_capability(q.device) >= (9, 0)


def _beside(x: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """[N, H, head_dim] as [documents, H, longest, head_dim], a view."""
    return x.unflatten(0, (layout.documents, layout.longest)).transpose(1, 2)


def _end_to_end(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def _edges(q: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    if layout.edges is not None:
        return layout.edges
    return torch.arange(layout.documents + 1, dtype=torch.int32, device=q.device) * layout.longest


def _pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, v, layout, scale = inputs
    return *backward(cotangents[0], q, k, v, outputs, layout, scale), None, None


fused_attention = custom_vjp(forward, _pull, constant_outputs=(1, 2, 3))
"""`forward` with its derivative in q, k and v."""
