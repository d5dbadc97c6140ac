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
from areno_fn.steps.variants import AVERAGE

_HALF = {torch.bfloat16, torch.float16}


def foreseen(made: Plan, spec: Phase) -> Footprint | None:
    """The most that a training step of a phase takes on a GPU, its snapshots included and what draws samples left out.

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
        min(max(batch.micro_tokens, batch.max_length), rows * batch.max_length),
        remat=spec.remat,
        micro_batches=-(-rows * batch.max_length // batch.micro_tokens),
        dtype=dtypes.pop(),
    )
    here = {name for name in snapshots_of(spec) if name not in spec.offload}
    kept = sum(nbytes(shapes) if name != AVERAGE else 4 * count(shapes) for name in here)
    return found.beside({"snapshots": kept})
