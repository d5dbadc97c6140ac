"""Packed attention forward and backward by fused kernels, for primitives that contain it.

Documents of one length go to cuDNN's kernel on chips that prefer it (compute capability 9.0 and later). Documents of several
lengths, laid end to end, windows and soft caps go to the kernels of `triton.py`, which pad nothing: on an H200 they are faster
than torch's variable-length flash kernel at every shape that was measured (docs/performance.md), and add up in one order. On
chips before that one flash does what it can, which is all but soft caps and float32.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from areno_fn.autodiff import custom_vjp
from areno_fn.kernels.attention.layout import PackedLayout
from areno_fn.kernels.backend import backend

CUDNN_WIDEST, FLASH_WIDEST, EVEN = 128, 256, 8
"""The widest heads of either kernel, and what their width is a multiple of."""
CUDNN_SHORTEST = 64
"""The shortest documents that are given to cuDNN, which refuses some lengths below."""


def takes(x: torch.Tensor, head_dim: int) -> bool:
    """Whether these kernels take heads like `x` in dtype and device: half precision on the GPU, outside a traced graph."""
    low = x.dtype in (torch.bfloat16, torch.float16)
    fits = head_dim <= FLASH_WIDEST and head_dim % EVEN == 0
    return x.is_cuda and low and fits and not torch.compiler.is_compiling()


def forms(q: torch.Tensor) -> bool:
    """Whether the kernels of `triton.py` take heads like `q`, outside a traced graph."""
    known = q.dtype in (torch.float32, torch.bfloat16, torch.float16) and q.shape[-1] <= FLASH_WIDEST
    return known and not torch.compiler.is_compiling() and backend("attention", q) == "triton"


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PackedLayout,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """The result [N, H, head_dim], and the tensors beside it that `backward` needs; arguments as `packed_attention`'s."""
    longest = layout.longest
    kernel = kernel_of(q, layout, window, soft_cap)
    if kernel == "triton":
        made = importlib.import_module("areno_fn.kernels.attention.triton").forward
        out, lse = made(q, k, v, _edges(q, layout), longest, scale, window, soft_cap)
        return out, lse, lse.new_empty(0), lse.new_empty(0)
    if kernel == "cudnn":
        sides = (_beside(x, layout) for x in (q, k, v))
        out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *sides, None, True, 0.0, True, False, scale=scale
        )
        return _end_to_end(out), lse, seed, offset
    edges = _edges(q, layout)
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, edges, edges, longest, longest, 0.0, True, False, scale=scale, **_sides(window)
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
    window: int = 0,
    soft_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cotangents of q, k and v, [N, .., head_dim] each; `kept` is what `forward` returned."""
    out, lse, state, other = kept
    longest = layout.longest
    kernel = kernel_of(q, layout, window, soft_cap)
    if kernel == "triton":
        pull = importlib.import_module("areno_fn.kernels.attention.pull").backward
        dq, dk, dv = pull(dout, q, k, v, out, lse, _edges(q, layout), longest, scale, window, soft_cap)
        return dq, dk, dv
    if kernel == "cudnn":
        sides = (_beside(x, layout) for x in (dout, q, k, v, out))
        pulled = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *sides, lse, state, other, None, None, None, longest, longest, 0.0, True, scale=scale
        )
        dq, dk, dv = (_end_to_end(x) for x in pulled)
        return dq, dk, dv
    edges = _edges(q, layout)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dout.contiguous(), q, k, v, out, lse, edges, edges, longest, longest, 0.0, True, state, other, scale=scale,
        **_sides(window),
    )  # fmt: skip
    return dq, dk, dv


def kernel_of(q: torch.Tensor, layout: PackedLayout, window: int = 0, soft_cap: float = 0.0) -> str:
    """Which kernel it is: cudnn, triton or flash."""
    if soft_cap or q.dtype == torch.float32 or not q.is_cuda:
        return "triton"
    if dense(q, layout, window):
        return "cudnn"
    return "triton" if _is_late(q) or q.shape[-1] % EVEN else "flash"


def _is_late(q: torch.Tensor) -> bool:
    """Whether the chip is one whose kernels were compared."""
    return torch.cuda.get_device_capability(q.device) >= (9, 0)


def _sides(window: int) -> dict[str, int]:
    """How many keys before a query and behind it are seen besides its own."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def dense(q: torch.Tensor, layout: PackedLayout, window: int = 0) -> bool:
    """Whether cuDNN's kernel is the one: documents of one length that are long enough, and heads narrow enough."""
    if not q.is_cuda or window or layout.edges is not None or layout.longest < CUDNN_SHORTEST:
        return False
    if q.shape[-1] > CUDNN_WIDEST:
        return False
    return _is_late(q)


def _beside(x: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """[N, H, head_dim] as [documents, H, longest, head_dim], a view."""
    return x.unflatten(0, (layout.documents, layout.longest)).transpose(1, 2)


def _end_to_end(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def _edges(q: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    if layout.edges is not None:
        return layout.edges
    return torch.arange(layout.documents + 1, dtype=torch.int32, device=q.device) * layout.longest


def fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PackedLayout,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """The result of `forward`, with its derivative in q, k and v."""
    out: torch.Tensor = _fused(q, k, v, layout.edges, layout.documents, layout.longest, scale, window, soft_cap)[0]
    return out


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *where: Any) -> tuple[torch.Tensor, ...]:
    """`forward` with the layout in parts: a transform would wrap a tensor inside a record, and hand that over."""
    edges, documents, longest, *how = where
    return forward(q, k, v, _laid(edges, documents, longest), *how)


def _pull(cotangents: tuple[Any, ...], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, v, edges, documents, longest, *how = inputs
    pulled = backward(cotangents[0], q, k, v, outputs, _laid(edges, documents, longest), *how)
    return *pulled, *[None] * (len(inputs) - 3)


def _laid(edges: torch.Tensor | None, documents: int, longest: int) -> PackedLayout:
    return PackedLayout(source=None, place=None, edges=edges, documents=documents, longest=longest)


_fused = custom_vjp(_forward, _pull, constant_outputs=(1, 2, 3))
