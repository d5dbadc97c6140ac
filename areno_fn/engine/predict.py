"""How much memory a training step will take, from layouts alone."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.footprint import Footprint, largest
from areno_fn.contracts.spec import OptimizerSpec
from areno_fn.kernels.linear_token_loss import CHUNK, rows_at_once
from areno_fn.models import decoder_memory
from areno_fn.models.decoder import DecoderConfig, shapes
from areno_fn.steps.optimizers import optimizer
from areno_fn.steps.optimizers.master import MasterState
from areno_fn.steps.token.sampling import MAX_LOGITS

LIBRARIES = 2 * 2**25
"""Bytes that cuBLAS takes for the forward and for the backward pass, each in a thread of its own."""

EVEN, TILE = 64, 256
"""Elements whose multiple a row of logits takes, and of which three sums are kept."""


def predict(
    config: DecoderConfig,
    spec: OptimizerSpec,
    tokens: int,
    *,
    decisions: int | None = None,
    remat: int = 0,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Footprint:
    """The largest memory of a donated training step of all parameters of a dense decoder on a GPU, and when that is.

    Args:
        config: the model.
        spec: what moves it.
        tokens: of the largest micro-batch.
        decisions: of it, tokens that are trained on; all when omitted.
        remat: every which layer is computed again in the backward pass; 0 for none.
        micro_batches: of a step; the gradients of several are added up in float32.
        dtype: of the parameters, a half precision.
    """
    params = shapes(config, dtype)
    state = optimizer(spec, 1).init(params)
    masters = state.master if isinstance(state, MasterState) else {}
    everything = {
        "parameters": nbytes(params),
        "masters": nbytes(masters),
        "moments": nbytes(state) - nbytes(masters),
        "sums": sum(leaf.numel() * 4 for leaf in tree.leaves(params)) if micro_batches > 1 else 0,
        "libraries": LIBRARIES,
    }
    decided = tokens if decisions is None else decisions
    work = decoder_memory.Work(
        config=config, tokens=tokens, decisions=decided, remat=remat, dtype=dtype, head=_head(config, decided, dtype)
    )
    update = Footprint(moment="in the update", parts={"gradients": nbytes(params)})
    return largest(moment.beside(everything) for moment in (*decoder_memory.moments(work), update))


def nbytes(value: Any) -> int:
    """Bytes of the tensors of a tree."""
    return sum(leaf.nbytes for leaf in tree.leaves(value) if isinstance(leaf, torch.Tensor))


def _head(config: DecoderConfig, rows: int, dtype: torch.dtype) -> int:
    """Bytes that the head needs while it makes gradients of its rows and, in float32, of its matrix, or hands them on."""
    width, size, least = config.hidden_size, config.vocab_size, dtype.itemsize
    if rows * size <= MAX_LOGITS:
        return 2 * rows * size * least + rows * width * (4 + least) + size * width * least
    part = rows_at_once(rows, size, CHUNK)
    sums = 12 * part * -(-size // TILE) if dtype == torch.bfloat16 else 0
    logits = part * (size + -size % EVEN) * least + part * width * (8 + least) + sums
    handed = (rows + size) * width * least
    return size * width * 4 + rows * width * least + max(logits, handed)
