"""AdamW in one pass over every number, where the leaves lie on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.kernels.adamw import Factors, Updated, adamw_update, adamw_update_in_place
from areno_fn.steps.optimizers.adam import ScaleByAdamState, bias
from areno_fn.steps.optimizers.chain import reports
from areno_fn.steps.optimizers.clip import ClipByGlobalNormState, clip_factor, global_norm
from areno_fn.steps.optimizers.decay import Mask
from areno_fn.steps.optimizers.master import MasterState
from areno_fn.steps.optimizers.rate import ScaleByLearningRateState

Applied = tuple[Any, MasterState, dict[str, torch.Tensor]]


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

    def passed(gradients: Any, state: MasterState, params: Any, in_place: bool) -> Applied:
        named, slopes = tree.leaves_with_path(params), tree.leaves(gradients)
        _, adam, _, rated = state.inner
        norm = global_norm(slopes).float()
        count, updates = adam.count + 1, rated.count + 1
        rate = schedule(updates)
        factors = Factors(clip_factor(norm, limit), rate, bias(spec.betas[0], count), bias(spec.betas[1], count))
        masters = [state.master.get(path, leaf) for path, leaf in named]
        decay = [spec.weight_decay if mask(path, leaf) else 0.0 for path, leaf in named]
        given = slopes, masters, tree.leaves(adam.mu), tree.leaves(adam.nu), [leaf for _, leaf in named]
        new = _by_dtype(*given, decay, factors, spec, in_place)
        inner = (
            ClipByGlobalNormState(norm=norm),
            ScaleByAdamState(count=count, mu=tree.unflatten(adam.mu, new.mu), nu=tree.unflatten(adam.nu, new.nu)),
            (),
            ScaleByLearningRateState(count=updates, rate=rate),
        )
        low = {path: leaf for (path, _), leaf in zip(named, new.master, strict=True) if path in state.master}
        return tree.unflatten(params, new.stored), MasterState(master=low, inner=inner), reports(inner)

    def apply(gradients: Any, state: MasterState, params: Any) -> Applied:
        if not takes(tree.leaves(params), tree.leaves(gradients)):
            return composed.apply(gradients, state, params)
        return passed(gradients, state, params, in_place=False)

    def apply_in_place(gradients: Any, state: MasterState, params: Any) -> Applied:
        if takes(tree.leaves(params), tree.leaves(gradients)):
            return passed(gradients, state, params, in_place=True)
        moved, after, stats = composed.apply(gradients, state, params)
        _write_over((params, state), (moved, after))
        return params, state, stats

    return Optimizer(init=composed.init, apply=apply, apply_in_place=apply_in_place)


def takes(leaves: list[torch.Tensor], gradients: list[torch.Tensor]) -> bool:
    """Whether the pass is made for such leaves: on a GPU, in float32 or less, outside a traced graph."""
    wide = any(x.dtype == torch.float64 for x in (*leaves, *gradients))
    return all(x.is_cuda for x in leaves) and not wide and not torch.compiler.is_compiling()


def _write_over(old: Any, new: Any) -> None:
    for before, after in zip(tree.leaves(old), tree.leaves(new), strict=True):
        before.copy_(after)


def _by_dtype(
    gradients: list[torch.Tensor],
    masters: list[torch.Tensor],
    mu: list[torch.Tensor],
    nu: list[torch.Tensor],
    stored: list[torch.Tensor],
    decay: list[float],
    factors: Factors,
    spec: AdamWSpec,
    in_place: bool,
) -> Updated:
    """One pass for each dtype that parameters are stored in and gradients come in."""
    kinds = [(leaf.dtype, g.dtype) for leaf, g in zip(stored, gradients, strict=True)]
    found: dict[int, tuple[torch.Tensor, ...]] = {}
    for kind in dict.fromkeys(kinds):
        chosen = [i for i, own in enumerate(kinds) if own == kind]
        slopes, old, first, second, kept = (
            [leaves[i] for i in chosen] for leaves in (gradients, masters, mu, nu, stored)
        )
        rates = [decay[i] for i in chosen]
        if in_place:
            adamw_update_in_place(slopes, old, first, second, kept, rates, factors, spec.betas, spec.eps)
            new = Updated(old, first, second, kept)
        else:
            new = adamw_update(slopes, old, first, second, kind[0], rates, factors, spec.betas, spec.eps)
        found |= dict(zip(chosen, zip(*new, strict=True), strict=True))
    master, first, second, kept = ([found[i][part] for i in range(len(kinds))] for part in range(4))
    return Updated(master, first, second, kept)
