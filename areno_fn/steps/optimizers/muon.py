"""Muon (Jordan et al., 2024; arXiv 2502.16982) for hidden matrices, beside AdamW for everything else."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from areno_fn import tree
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.optim import Optimizer, Transform
from areno_fn.contracts.record import record, shown
from areno_fn.contracts.spec import MuonSpec
from areno_fn.steps.optimizers.adam import scale_by_adam
from areno_fn.steps.optimizers.groups import assembled, labels_of, settings
from areno_fn.steps.optimizers.orthogonal import COEFFICIENTS, Placements, blocks, joined, orthogonal_each

Adjust = Literal["original", "match_rms_adamw", "none"]


@record
class ScaleByMuonState:
    """The running mean of the gradient, a tree like the parameters, float32 (float64 for float64 parameters)."""

    momentum: Any


def scale_by_muon(
    momentum: float = 0.95,
    nesterov: bool = True,
    adjust: Adjust = "original",
    iterations: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    placements: Placements | None = None,
) -> Transform:
    r"""Replaces the gradient of every matrix by the orthogonal factor of its momentum.

        m <- b m + (1 - b) g,    u = s O(b m + (1 - b) g)    (O(m) without nesterov)

    with O of `orthogonal` and s by the shape [E, D] of the matrix: sqrt(max(1, E/D)) for "original",
    0.2 sqrt(max(E, D)) for "match_rms_adamw" (Moonlight, with which AdamW's learning rate and decay serve), 1 for "none".
    Equal to `torch.optim.Muon`, followed by `add_decayed_weights` and `scale_by_learning_rate`.

    A fused leaf is orthogonalised block by block, and s is that of a block: as one matrix, q, k and v
    would share the singular values that each should have.

    Args:
        dtype: in which O is computed; bfloat16, as torch does.
        placements: by path, how ranks share a leaf, which says what is fused in it.
    """
    fused = placements or {}

    def init(params: Any) -> ScaleByMuonState:
        for path, leaf in tree.leaves_with_path(params):
            if leaf.ndim < 2:
                raise RecordError(
                    f"Muon was given {path}, which is {shown(leaf)}, but it moves matrices alone; "
                    f"leave it to another optimizer in a partition"
                )
        zeros = tree.map(lambda leaf: torch.zeros_like(leaf, dtype=_wide(leaf)), params)
        return ScaleByMuonState(momentum=zeros)

    def update(updates: Any, state: ScaleByMuonState, params: Any) -> tuple[Any, ScaleByMuonState]:
        gradient = tree.leaves(updates)
        mean = torch._foreach_lerp(tree.leaves(state.momentum), gradient, 1 - momentum)
        ahead = torch._foreach_lerp(gradient, mean, momentum) if nesterov else mean
        paths = [path for path, _ in tree.leaves_with_path(params)]
        parts = [blocks(leaf, fused.get(path)) for path, leaf in zip(paths, ahead, strict=True)]
        found = iter(orthogonal_each([part for leaf in parts for part in leaf], iterations, coefficients, eps, dtype))
        moves = [
            joined([next(found).to(part.dtype) * _scale(part, adjust) for part in leaf], fused.get(path))
            for path, leaf in zip(paths, parts, strict=True)
        ]
        return tree.unflatten(updates, moves), ScaleByMuonState(momentum=tree.unflatten(state.momentum, mean))

    return Transform(init=init, update=update)


@checked
def muon(spec: MuonSpec, total_steps: int, placements: Placements | None = None) -> Optimizer:
    """The optimizer of a specification: Muon for hidden matrices and AdamW for the remainder, under one clip.

    It reports grad_norm and lr, that of Muon.

    Args:
        spec: `max_grad_norm = 0` does not clip.
        total_steps: optimizer steps of the phase, where the schedule does not say how long it decays.
        placements: by path, how ranks share a leaf: what is fused, and what is an embedding or a head.
    """

    def matrices() -> Transform:
        return scale_by_muon(spec.momentum, spec.nesterov, spec.adjust, spec.iterations, placements=placements)

    def others() -> Transform:
        return scale_by_adam(*spec.adamw.betas, eps=spec.adamw.eps)

    parts = settings("muon", spec, spec.schedule, total_steps, matrices)
    parts |= settings("adamw", spec.adamw, spec.schedule, total_steps, others, placements=placements)
    return assembled(spec.max_grad_norm, parts, labels_of(spec, placements))


def _scale(matrix: torch.Tensor, adjust: Adjust) -> float:
    rows, columns = matrix.shape[-2:]
    if adjust == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else 1.0


def _wide(leaf: torch.Tensor) -> torch.dtype:
    return torch.promote_types(leaf.dtype, torch.float32)
