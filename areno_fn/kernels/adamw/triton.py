"""The AdamW update in Triton: one launch over the pieces of all leaves, which are found through a table of addresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from areno_fn.kernels.launch import on_device_of, type_of

BLOCK, STEPS = 2048, 8
"""Elements that are in registers at once, and how often that is a piece: the work of one program."""
EVEN = 128
"""What the place of a leaf in an allocation is a multiple of, in elements."""
ALIGNED = 16
"""Bytes that an address must be a multiple of for the widest loads."""


def update(
    gradients: Sequence[torch.Tensor],
    master: Sequence[torch.Tensor],
    mu: Sequence[torch.Tensor],
    nu: Sequence[torch.Tensor],
    stored: torch.dtype,
    decay: Sequence[float],
    factors: Sequence[torch.Tensor],
    betas: tuple[float, float],
    eps: float,
) -> tuple[list[torch.Tensor], ...]:
    """New masters, both moments, and the masters in the dtype of the parameters; contiguous."""
    given = [[x.contiguous() for x in leaves] for leaves in (gradients, master, mu, nu)]
    own = master[0].dtype
    new = [_like(master, own) for _ in range(3)]
    kept = new[0] if stored == own else _like(master, stored)
    _launch([*given, *new, kept], decay, factors, betas, eps)
    return *new, kept


def update_in_place(
    gradients: Sequence[torch.Tensor],
    master: Sequence[torch.Tensor],
    mu: Sequence[torch.Tensor],
    nu: Sequence[torch.Tensor],
    stored: Sequence[torch.Tensor],
    decay: Sequence[float],
    factors: Sequence[torch.Tensor],
    betas: tuple[float, float],
    eps: float,
) -> None:
    """The same, written over what it is made of; all but the gradients contiguous."""
    states = [master, mu, nu]
    _launch([[x.contiguous() for x in gradients], *states, *states, stored], decay, factors, betas, eps)
    # what is derived from a tensor, and autograd, tell by its version that it was written to
    torch.autograd.graph.increment_version([*master, *mu, *nu, *stored])


def _launch(
    columns: Sequence[Sequence[torch.Tensor]],
    decay: Sequence[float],
    factors: Sequence[torch.Tensor],
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Gradients, masters and moments, the places of the new ones, and that of the parameters."""
    gradients, master, kept = columns[0], columns[1], columns[7]
    device = gradients[0].device
    addresses = torch.tensor([[x.data_ptr() for x in leaves] for leaves in columns], dtype=torch.int64)
    aligned = not bool((addresses % ALIGNED).any())
    leaf, first, sizes = _pieces(tuple(x.numel() for x in master), device)
    numbers = torch.stack([x.reshape(()).to(torch.float32) for x in factors])
    if len(leaf):
        with on_device_of(gradients[0]):
            _update_kernel[(len(leaf),)](
                _on(addresses, device), leaf, first, sizes, _decays(tuple(decay), device), numbers, len(sizes),
                B1=betas[0], B2=betas[1], EPS=eps, GRADIENT=type_of(gradients[0].dtype), OWN=type_of(master[0].dtype),
                STORED=type_of(kept[0].dtype), NARROW=kept[0].dtype != master[0].dtype, ALIGNED=aligned, BLOCK=BLOCK,
                STEPS=STEPS, num_warps=8, enable_fp_fusion=True,
            )  # fmt: skip


def _like(leaves: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """New leaves, contiguous and aligned, in one allocation: the host spends as long on one as on a launch."""
    shapes = tuple(x.shape for x in leaves)
    places, total = _places(shapes)
    memory = torch.empty(total, dtype=dtype, device=leaves[0].device)
    return [
        part[: shape.numel()].view(shape) for part, shape in zip(memory.split_with_sizes(places), shapes, strict=True)
    ]


@lru_cache(maxsize=16)
def _places(shapes: tuple[torch.Size, ...]) -> tuple[list[int], int]:
    """Elements that each leaf gets, a multiple of `EVEN`, and their sum."""
    places = [triton.cdiv(shape.numel(), EVEN) * EVEN for shape in shapes]
    return places, sum(places)


@lru_cache(maxsize=16)
def _pieces(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For every piece its leaf, int32, and its first element, int64; and the sizes of the leaves, int64."""
    counts = torch.tensor([triton.cdiv(size, BLOCK * STEPS) for size in sizes])
    leaf = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = (torch.arange(len(leaf)) - (counts.cumsum(0) - counts)[leaf]) * (BLOCK * STEPS)
    return leaf.int().to(device), first.to(device), torch.tensor(sizes).to(device)


@lru_cache(maxsize=16)
def _decays(decay: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(decay, dtype=torch.float32).to(device)


def _on(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device that the host does not wait for.

    A graph would copy from the host again whenever it is replayed, from memory that is no longer this table's; while one
    is captured, the numbers are therefore given to launches, of which they become a part.
    """
    if device.type != "cuda":
        return table
    if not torch.cuda.is_current_stream_capturing():
        return table.pin_memory().to(device, non_blocking=True)
    places = torch.zeros(table.shape, dtype=table.dtype, device=device)
    torch._foreach_add_(list(places.flatten().unbind()), table.flatten().tolist())
    return places


@triton.jit
def _update_kernel(
    table_ptr, leaf_ptr, first_ptr, size_ptr, decay_ptr, numbers_ptr, leaves,
    B1: tl.constexpr, B2: tl.constexpr, EPS: tl.constexpr, GRADIENT: tl.constexpr, OWN: tl.constexpr, STORED: tl.constexpr,
    NARROW: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    leaf = tl.load(leaf_ptr + piece)
    first = tl.load(first_ptr + piece)
    size = tl.load(size_ptr + leaf)
    # loads are only as wide as their mask allows, so that a whole piece has none
    if first + BLOCK * STEPS <= size:
        _update_piece(
            table_ptr + leaf, decay_ptr + leaf, numbers_ptr, leaves, first, size,
            B1, B2, EPS, GRADIENT, OWN, STORED, NARROW, ALIGNED, False, BLOCK, STEPS,
        )  # fmt: skip
    else:
        _update_piece(
            table_ptr + leaf, decay_ptr + leaf, numbers_ptr, leaves, first, size,
            B1, B2, EPS, GRADIENT, OWN, STORED, NARROW, ALIGNED, True, BLOCK, STEPS,
        )  # fmt: skip


@triton.jit
def _update_piece(
    table_ptr, decay_ptr, numbers_ptr, leaves, first, size,
    B1: tl.constexpr, B2: tl.constexpr, EPS: tl.constexpr, GRADIENT: tl.constexpr, OWN: tl.constexpr, STORED: tl.constexpr,
    NARROW: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    factor = tl.load(numbers_ptr)
    rate = tl.load(numbers_ptr + 1)
    bias_1 = tl.load(numbers_ptr + 2)
    bias_2 = tl.load(numbers_ptr + 3)
    decay = tl.load(decay_ptr)
    g_ptr = tl.load(table_ptr).to(tl.pointer_type(GRADIENT))
    p_ptr = tl.load(table_ptr + leaves).to(tl.pointer_type(OWN))
    m_ptr = tl.load(table_ptr + 2 * leaves).to(tl.pointer_type(OWN))
    n_ptr = tl.load(table_ptr + 3 * leaves).to(tl.pointer_type(OWN))
    new_p_ptr = tl.load(table_ptr + 4 * leaves).to(tl.pointer_type(OWN))
    new_m_ptr = tl.load(table_ptr + 5 * leaves).to(tl.pointer_type(OWN))
    new_n_ptr = tl.load(table_ptr + 6 * leaves).to(tl.pointer_type(OWN))
    stored_ptr = tl.load(table_ptr + 7 * leaves).to(tl.pointer_type(STORED))
    for step in range(STEPS):
        offset = first + step * BLOCK + tl.arange(0, BLOCK)
        g = _read(g_ptr, offset, size, ALIGNED, MASKED, BLOCK).to(tl.float32) * factor
        p = _read(p_ptr, offset, size, ALIGNED, MASKED, BLOCK).to(tl.float32)
        m = _read(m_ptr, offset, size, ALIGNED, MASKED, BLOCK).to(tl.float32)
        n = _read(n_ptr, offset, size, ALIGNED, MASKED, BLOCK).to(tl.float32)
        m += (g - m) * (1 - B1)
        n = n * B2 + g * g * (1 - B2)
        direction = m / bias_1 / (tl.sqrt(n / bias_2) + EPS)
        p -= rate * (direction + decay * p)
        _write(new_p_ptr, offset, size, p.to(OWN), ALIGNED, MASKED, BLOCK)
        _write(new_m_ptr, offset, size, m.to(OWN), ALIGNED, MASKED, BLOCK)
        _write(new_n_ptr, offset, size, n.to(OWN), ALIGNED, MASKED, BLOCK)
        if NARROW:
            _write(stored_ptr, offset, size, p.to(STORED), ALIGNED, MASKED, BLOCK)


@triton.jit
def _read(ptr, offset, size, ALIGNED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    at = ptr + offset
    if ALIGNED:
        at = tl.max_contiguous(tl.multiple_of(at, 16), BLOCK)
    return tl.load(at, mask=offset < size, other=0.0) if MASKED else tl.load(at)


@triton.jit
def _write(ptr, offset, size, x, ALIGNED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    at = ptr + offset
    if ALIGNED:
        at = tl.max_contiguous(tl.multiple_of(at, 16), BLOCK)
    if MASKED:
        tl.store(at, x, mask=offset < size)
    else:
        tl.store(at, x)
