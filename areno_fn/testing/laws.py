"""Laws that a part must obey, each one call. A broken law is an `AssertionError` that says which and where.

A law uses only what the part itself uses: no seeds, no clock, and no files unless files are the part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from areno_fn import random, tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.actions import Sums
from areno_fn.contracts.batch import Prompts, Rollout
from areno_fn.contracts.key import Key
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.record import shown
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.token.experience import experience
from areno_fn.steps.token.rollout import sampler
from areno_fn.steps.token.score import act
from areno_fn.testing.checkpoints import checkpoint_roundtrip
from areno_fn.testing.donation import donation_agrees
from areno_fn.testing.flow import trajectory_matches_training
from areno_fn.testing.invariance import accumulation_invariant, exact_under_split, permutation_invariant
from areno_fn.testing.isos import iso_roundtrip
from areno_fn.testing.kernels import kernel_agrees
from areno_fn.testing.layouts import layout_agrees, placements_agree, shards_agree
from areno_fn.testing.masks import mask_blind
from areno_fn.testing.optimizers import optimizer_matches
from areno_fn.testing.ownership import no_alias, roles_disjoint_exhaustive
from areno_fn.testing.purity import pure, step_is_pure
from areno_fn.testing.resume import Run, resume_exact
from areno_fn.testing.rowwise import batch_invariant
from areno_fn.testing.sizes import floating, is_floating, require_some

__all__ = [
    "Run",
    "accumulation_invariant",
    "batch_invariant",
    "checkpoint_roundtrip",
    "donation_agrees",
    "exact_under_split",
    "gradient",
    "iso_roundtrip",
    "kernel_agrees",
    "layout_agrees",
    "mask_blind",
    "no_alias",
    "optimizer_matches",
    "permutation_invariant",
    "placements_agree",
    "pure",
    "resume_exact",
    "roles_disjoint_exhaustive",
    "rollout_matches_training",
    "shards_agree",
    "step_is_pure",
    "trajectory_matches_training",
]


def gradient(
    function: Callable[..., Any],
    params: Any,
    *args: Any,
    directions: int = 3,
    step: float = 1e-5,
    tolerance: float = 1e-6,
) -> None:
    """The gradient is that of the value: compared with central differences in float64.

    Args:
        function: `(params, *args) ->` a scalar tensor or `Sums`, of which `total` counts.
        params: a tree of tensors; floating leaves are moved and computed in float64.
        args: further arguments; floating tensors in them are cast to float64.
        directions: along how many random directions the derivative is taken.
        step: length of the difference.
        tolerance: largest deviation relative to the derivative (or to 1 where that is smaller).

    Raises:
        AssertionError: the two derivatives differ, or the gradient is not finite.
        ValueError: there is no direction, or no floating element to move.
    """
    require_some(directions, f"directions={directions} tries none", "give gradient 1 at least")
    elements = sum(leaf.numel() for leaf in floating(params))
    require_some(elements, "params hold no floating-point element", "give gradient what is trained")
    params, args = _double(params), tuple(_double(arg) for arg in args)

    def value(moved: Any) -> torch.Tensor:
        result = function(moved, *args)
        total = result.total if isinstance(result, Sums) else result
        if not isinstance(total, torch.Tensor) or total.ndim:
            raise AssertionError(f"the function returned {shown(total)}; it must return a scalar tensor or Sums")
        return total

    _, slope = value_and_grad(value)(params)
    for number in range(directions):
        direction = _direction(params, Key.of(number))
        expected = (value(_moved(params, direction, step)) - value(_moved(params, direction, -step))) / (2 * step)
        received = sum((s * d).sum() for s, d in _floating_pairs(slope, direction))
        error = float(abs(torch.as_tensor(received) - expected))
        if not error <= tolerance * max(1.0, abs(float(expected))):
            raise AssertionError(
                f"along direction {number} the gradient gives {float(received):.9g}, "
                f"but the value changes by {float(expected):.9g} per unit"
            )


def rollout_matches_training(
    policy: TokenPolicy,
    params: Any,
    prompts: Prompts,
    key: Key,
    sampling: Sampling,
    *,
    stop: tuple[int, ...] = (),
    samples: int = 2,
    tolerance: float = 1e-5,
) -> Rollout:
    """The log-probability that the rollout recorded is the one that training recomputes on the same tokens.

    Also draws every prompt alone: a sequence must not depend on the batch that it was drawn in.

    Args:
        policy: the model's functions.
        params: its parameters.
        prompts: B prompts.
        key: names the draws.
        sampling: the distribution, with a temperature above 0.
        stop: tokens that end a completion.
        samples: completions per prompt.
        tolerance: largest absolute difference of a log-probability.

    Returns:
        The rollout that was checked.

    Raises:
        AssertionError: names the worst decision and both numbers.
        ValueError: there is no prompt, or no completion of one.
    """
    drawn = prompts.lengths.shape[0] * samples
    require_some(drawn, "no completion is drawn", "give rollout_matches_training a prompt and samples of 1 at least")
    draw = sampler(policy, stop)
    rollout: Rollout = draw(params, prompts, key, sampling, samples=samples)
    advantages = torch.zeros(rollout.lengths.shape[0])
    rescore = act(policy, sampling)
    for batch in experience(rollout, advantages, micro_tokens=1 << 30):
        packed = batch.packed
        places = packed.positions[packed.index] + 1
        named = [f"token {t} at position {p}" for t, p in zip(packed.targets.tolist(), places.tolist(), strict=True)]
        _close(rescore(params, batch).logp, batch.old, tolerance, named, "training recomputes")
    for row in range(prompts.lengths.shape[0]):
        alone = draw(params, _row(prompts, row), key, sampling, samples=samples)
        for sample in range(samples):
            _same_sequence(rollout, row * samples + sample, alone, sample, tolerance)
    return rollout


def _double(value: Any) -> Any:
    return tree.map(lambda x: x.double() if is_floating(x) else x, value)


def _direction(params: Any, key: Key) -> Any:
    """A random direction of length 1, as a list of one tensor per floating leaf."""
    parts = []
    for number, leaf in enumerate(floating(params)):
        place = torch.arange(leaf.numel())
        parts.append(random.normal(key.fold(number), place, dtype=torch.float64).reshape(leaf.shape).to(leaf.device))
    length = torch.sqrt(sum((p * p).sum() for p in parts) + torch.zeros((), dtype=torch.float64))
    return [p / length for p in parts]


def _moved(params: Any, direction: list[torch.Tensor], by: float) -> Any:
    steps = iter(direction)
    return tree.map(lambda x: x + by * next(steps) if is_floating(x) else x, params)


def _floating_pairs(slope: Any, direction: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(floating(slope), direction, strict=True))


def _close(received: torch.Tensor, recorded: torch.Tensor, tolerance: float, named: Sequence[str], doing: str) -> None:
    error = (received - recorded).abs()
    if not bool((error <= tolerance).all()):
        worst = int(error.nan_to_num(torch.inf).argmax())
        raise AssertionError(
            f"{named[worst]} was recorded with log-probability {float(recorded[worst]):.7f}, "
            f"but {doing} {float(received[worst]):.7f}"
        )


def _row(prompts: Prompts, row: int) -> Prompts:
    chosen = slice(row, row + 1)
    return Prompts(tokens=prompts.tokens[chosen], lengths=prompts.lengths[chosen], ids=prompts.ids[chosen])


def _same_sequence(batch: Rollout, i: int, alone: Rollout, j: int, tolerance: float) -> None:
    a = batch.tokens[i, : int(batch.lengths[i])]
    b = alone.tokens[j, : int(alone.lengths[j])]
    if not torch.equal(a, b):
        raise AssertionError(
            f"sequence {i} of the batch is {a.tolist()}, but drawn without the others it is {b.tolist()}"
        )
    named = [f"token {place} of sequence {i}" for place in range(len(a))]
    _close(alone.logp[j, : len(b)], batch.logp[i, : len(a)], tolerance, named, "drawn without the others has")
