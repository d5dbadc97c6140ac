"""AdamW in one pass over every number, where the leaves lie on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.kernels.adamw import Factors, Updated, adamw_update
from areno_fn.steps.optimizers.adam import ScaleByAdamState, bias
from areno_fn.steps.optimizers.chain import reports
from areno_fn.steps.optimizers.clip import ClipByGlobalNormState, clip_factor, global_norm
from areno_fn.steps.optimizers.decay import Mask
from areno_fn.steps.optimizers.master import MasterState
from areno_fn.steps.optimizers.rate import ScaleByLearningRateState


def with_one_pass(
    composed: Optimizer, spec: AdamWSpec, schedule: Callable[[torch.Tensor], torch.Tensor], mask: Mask
) -> Optimizer:
    """The same optimizer, state for state and up to roundings, with `adamw_update` in the place of its transforms.

    Args:
        composed: clip, Adam, decay and learning rate around float32 masters, without groups. It goes on where there is no
            GPU, and in a traced graph, whose compiler fuses what it finds.
        spec: what it was made of.
        schedule: the rate as a function of the 1-based update.
        mask: which parameters decay.
    """
    limit = spec.max_grad_norm or math.inf

    def apply(gradients: Any, state: MasterState, params: Any) -> tuple[Any, MasterState, dict[str, torch.Tensor]]:
        named, slopes = tree.leaves_with_path(params), tree.leaves(gradients)
        if not takes([leaf for _, leaf in named], slopes):
            return composed.apply(gradients, state, params)
        _, adam, _, rated = state.inner
        norm = global_norm(slopes).float()
        count, updates = adam.count + 1, rated.count + 1
        rate = schedule(updates)
        factors = Factors(clip_factor(norm, limit), rate, bias(spec.betas[0], count), bias(spec.betas[1], count))
        masters = [state.master.get(path, leaf) for path, leaf in named]
        decay = [spec.weight_decay if mask(path, leaf) else 0.0 for path, leaf in named]
        new = _by_dtype([leaf.dtype for _, leaf in named], slopes, masters, adam, decay, factors, spec)
        inner = (
            ClipByGlobalNormState(norm=norm),
            ScaleByAdamState(count=count, mu=tree.unflatten(adam.mu, new.mu), nu=tree.unflatten(adam.nu, new.nu)),
            (),
            ScaleByLearningRateState(count=updates, rate=rate),
        )
        low = {path: leaf for (path, _), leaf in zip(named, new.master, strict=True) if path in state.master}
        return tree.unflatten(params, new.stored), MasterState(master=low, inner=inner), reports(inner)

    return Optimizer(init=composed.init, apply=apply)


def takes(leaves: list[torch.Tensor], gradients: list[torch.Tensor]) -> bool:
    """Whether the pass is made for such leaves: on a GPU, in float32 or less, outside a traced graph."""
    wide = any(x.dtype == torch.float64 for x in (*leaves, *gradients))
    return all(x.is_cuda for x in leaves) and not wide and not torch.compiler.is_compiling()


def _by_dtype(
    dtypes: list[torch.dtype],
    gradients: list[torch.Tensor],
    masters: list[torch.Tensor],
    adam: ScaleByAdamState,
    decay: list[float],
    factors: Factors,
    spec: AdamWSpec,
) -> Updated:
    """One pass for each dtype that parameters are stored in and gradients come in."""
    moments = tree.leaves(adam.mu), tree.leaves(adam.nu)
    kinds = list(zip(dtypes, [g.dtype for g in gradients], strict=True))
    found: dict[int, tuple[torch.Tensor, ...]] = {}
    for kind in dict.fromkeys(kinds):
        chosen = [i for i, own in enumerate(kinds) if own == kind]
        slopes, old, mu, nu = ([leaves[i] for i in chosen] for leaves in (gradients, masters, *moments))
        rates = [decay[i] for i in chosen]
        new = adamw_update(slopes, old, mu, nu, kind[0], rates, factors, spec.betas, spec.eps)
        found |= dict(zip(chosen, zip(*new, strict=True), strict=True))
    master, mu, nu, stored = ([found[i][part] for i in range(len(kinds))] for part in range(4))
    return Updated(master, mu, nu, stored)
