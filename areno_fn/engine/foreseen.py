"""The memory that the phases of a run will take, where it can be told from the specification."""

from __future__ import annotations

import torch

from areno_fn import tree
from areno_fn.contracts.footprint import Footprint
from areno_fn.contracts.spec import Phase, Repeated, Sampled
from areno_fn.engine.composition import snapshots_of
from areno_fn.engine.finetune import FullPlan, count
from areno_fn.engine.plan import Plan
from areno_fn.engine.predict import nbytes, predict
from areno_fn.models.decoder import DecoderConfig
from areno_fn.steps.recipes import ACTOR
from areno_fn.steps.token.sampling import cuts
from areno_fn.steps.token.sizes import coarse, rounded
from areno_fn.steps.variants import AVERAGE

_HALF = {torch.bfloat16, torch.float16}


def foreseen(made: Plan, spec: Phase) -> Footprint | None:
    """The most that a training step of a phase takes on a GPU, its snapshots included and what draws samples left out.

    Where updates are captured, what their graphs have set aside stands beside a step of a size that is not captured yet.

    None where there is no account of the layers: of other models than dense decoders, in float32, with adapters, or with a
    critic beside the actor; and where tokens are cut off before one is drawn, whose logits are made another way.
    """
    config = made.model.config
    shapes = made.trained.params[ACTOR]
    dtypes = {leaf.dtype for leaf in tree.leaves(shapes)}
    known = isinstance(config, DecoderConfig) and isinstance(made.finetune, FullPlan) and len(dtypes) == 1
    if not known or not dtypes <= _HALF or spec.algorithm.roles != (ACTOR,):
        return None
    batch, algorithm = spec.batch, spec.algorithm
    if isinstance(algorithm, Sampled) and cuts(algorithm.sampling, config.vocab_size):
        return None
    rows = batch.rows * (algorithm.samples if isinstance(algorithm, Repeated) else 1)
    rows = -(-rows // algorithm.minibatches) if isinstance(algorithm, Repeated) else rows
    (moved,) = spec.optimizers
    found = predict(
        config,
        moved,
        _tokens(spec, rows),
        remat=spec.remat,
        micro_batches=-(-rows * batch.max_length // batch.micro_tokens),
        dtype=dtypes.pop(),
    )
    here = {name for name in snapshots_of(spec) if name not in spec.offload}
    kept = sum(nbytes(shapes) if name != AVERAGE else 4 * count(shapes) for name in here)
    graphs = sum(size for name, size in found.parts.items() if name not in _LASTING) if spec.capture else 0
    return found.beside({"snapshots": kept, "graphs": graphs})


_LASTING = ("parameters", "masters", "moments")
"""What stays between steps."""


def _tokens(spec: Phase, rows: int) -> int:
    """Most tokens of a micro-batch, with its padding where it has one."""
    longest, every = spec.batch.max_length, rows * spec.batch.max_length
    if spec.capture:
        longest, every = rounded(longest + 1), rounded(every + coarse(rows + 1))
    return min(max(spec.batch.micro_tokens, longest), every)
