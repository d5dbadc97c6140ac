"""AdamW in one pass over every number, where the leaves lie on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import attrs
import torch

from areno_fn import tree
from areno_fn.contracts.optim import Optimizer
from areno_fn.kernels.adamw import Factors, Updated, adamw_update, adamw_update_in_place
from areno_fn.steps.optimizers.adam import ScaleByAdamState, bias
from areno_fn.steps.optimizers.chain import reports
from areno_fn.steps.optimizers.clip import ClipByGlobalNormState, clip_factor, global_norm
from areno_fn.steps.optimizers.decay import Mask
from areno_fn.steps.optimizers.master import MasterState
from areno_fn.steps.optimizers.partition import PartitionState
from areno_fn.steps.optimizers.rate import ScaleByLearningRateState

Applied = tuple[Any, MasterState, dict[str, torch.Tensor]]


@attrs.frozen(kw_only=True)
class Setting:
    """What one group of parameters is moved with.

    Attributes:
        schedule: the rate as a function of the 1-based update.
        weight_decay: of those that `mask` selects.
        mask: which parameters decay.
    """

    schedule: Callable[[torch.Tensor], torch.Tensor]
    weight_decay: float
    mask: Mask

    def decay(self, path: str, leaf: torch.Tensor) -> float:
        """The decay of a parameter."""
        return self.weight_decay if self.mask(path, leaf) else 0.0


@attrs.frozen(kw_only=True)
class Numbers:
    """What all groups share.

    Attributes:
        betas: how much of either moment stays.
        eps: added to the root.
        limit: of the norm of the gradient; infinity does not clip.
    """

    betas: tuple[float, float]
    eps: float
    limit: float = math.inf


def with_one_pass(composed: Optimizer, numbers: Numbers, settings: Mapping[str, Setting]) -> Optimizer:
    """The same optimizer, state for state and up to roundings, with `adamw_update` in the place of its transforms.

    Args:
        composed: clip, Adam, decay and learning rate around float32 masters, or a `partition` of such behind the clip. It
            goes on where there is no GPU, and in a traced graph, whose compiler fuses what it finds.
        numbers: what all parameters are moved with.
        settings: by label, in the order of the partition; one where there is none.
    """

    def passed(gradients: Any, state: MasterState, params: Any, in_place: bool) -> Applied:
        named, slopes = tree.leaves_with_path(params), tree.leaves(gradients)
        norm = global_norm(slopes).float()
        factor = clip_factor(norm, numbers.limit)
        leaves = {path: (leaf, slope) for (path, leaf), slope in zip(named, slopes, strict=True)}
        stored: dict[str, torch.Tensor] = {}
        masters: dict[str, torch.Tensor] = {}
        after: dict[str, tuple[Any, ...]] = {}
        for label, (adam, _, rated) in _groups(state.inner, settings).items():
            count, updates = adam.count + 1, rated.count + 1
            rate = settings[label].schedule(updates)
            biases = (bias(beta, count) for beta in numbers.betas)
            paths = list(adam.mu) if len(settings) > 1 else list(leaves)
            own = [leaves[path] for path in paths]
            held = [state.master.get(path, leaf) for path, (leaf, _) in zip(paths, own, strict=True)]
            given = _Columns(
                gradients=[slope for _, slope in own],
                master=held,
                mu=tree.leaves(adam.mu),
                nu=tree.leaves(adam.nu),
                stored=[leaf for leaf, _ in own],
                decay=[settings[label].decay(path, leaf) for path, (leaf, _) in zip(paths, own, strict=True)],
            )
            new = _by_dtype(given, Factors(factor, rate, *biases), numbers, in_place)
            stored |= dict(zip(paths, new.stored, strict=True))
            masters |= dict(zip(paths, new.master, strict=True))
            moments = {"mu": tree.unflatten(adam.mu, new.mu), "nu": tree.unflatten(adam.nu, new.nu)}
            after[label] = (
                ScaleByAdamState(count=count, **moments),
                (),
                ScaleByLearningRateState(count=updates, rate=rate),
            )
        clipped = ClipByGlobalNormState(norm=norm)
        inner = (clipped, *after.popitem()[1]) if len(settings) == 1 else (clipped, PartitionState(inner=after))
        moved = tree.unflatten(params, [stored[path] for path, _ in named])
        return moved, MasterState(master={path: masters[path] for path in state.master}, inner=inner), reports(inner)

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


def _groups(inner: tuple[Any, ...], settings: Mapping[str, Setting]) -> dict[str, tuple[Any, ...]]:
    """The states behind the clip by label; a label without parameters has none."""
    if len(settings) == 1:
        return dict.fromkeys(settings, inner[1:])
    found: dict[str, tuple[Any, ...]] = inner[1].inner
    return found


def _write_over(old: Any, new: Any) -> None:
    for before, after in zip(tree.leaves(old), tree.leaves(new), strict=True):
        before.copy_(after)


class _Columns(NamedTuple):
    """What an update takes of some parameters, in one order; each as `adamw_update_in_place` does."""

    gradients: list[torch.Tensor]
    master: list[torch.Tensor]
    mu: list[torch.Tensor]
    nu: list[torch.Tensor]
    stored: list[torch.Tensor]
    decay: list[float]


def _by_dtype(given: _Columns, factors: Factors, numbers: Numbers, in_place: bool) -> Updated:
    """One pass for each dtype that parameters are stored in and gradients come in."""
    kinds = [(leaf.dtype, slope.dtype) for leaf, slope in zip(given.stored, given.gradients, strict=True)]
    found: dict[int, tuple[torch.Tensor, ...]] = {}
    for kind in dict.fromkeys(kinds):
        chosen = [i for i, own in enumerate(kinds) if own == kind]
        gradients, master, mu, nu, stored = ([column[i] for i in chosen] for column in given[:5])
        decay = [given.decay[i] for i in chosen]
        if in_place:
            adamw_update_in_place(gradients, master, mu, nu, stored, decay, factors, numbers.betas, numbers.eps)
            new = Updated(master, mu, nu, stored)
        else:
            new = adamw_update(gradients, master, mu, nu, kind[0], decay, factors, numbers.betas, numbers.eps)
        found |= dict(zip(chosen, zip(*new, strict=True), strict=True))
    return Updated(*([found[i][part] for i in range(len(kinds))] for part in range(4)))
