"""Rewards: `load` finds the function a specification names, `score` asks it and holds it to its word.

A reward is `function(rows, completions) -> one number per completion`; the last part of this module holds a few.
"""

from __future__ import annotations

import copy
import importlib
import math
import numbers
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from areno_fn.contracts.errors import RewardError
from areno_fn.contracts.spec import RewardSpec

Rows = Sequence[Mapping[str, Any]]
RewardFunction = Callable[[list[dict[str, Any]], list[str]], Any]

LARGEST = 1e30
"""Rewards become float32; up to this size neither they nor what is computed from them overflows."""


@attrs.frozen(kw_only=True)
class Reward:
    """A judge of completions.

    Attributes:
        name: what its values are called in metrics.
        weight: its factor in the total.
        function: `function(rows, completions)`.
    """

    name: str
    weight: float
    function: RewardFunction


def load(spec: RewardSpec) -> Reward:
    """The reward that a specification names; the current directory is searched first, as with `python -m`.

    Raises:
        RewardError: the name is not `package.module:function`, or leads to nothing that can be called.
    """
    module_name, colon, attribute = spec.function.partition(":")
    if not (module_name and colon and attribute):
        raise RewardError(
            f"the reward {spec.function!r} must be written package.module:function, for example my_rewards:score"
        )
    function = getattr(_import(module_name, spec.function), attribute, None)
    if function is None:
        raise RewardError(f"the reward {spec.function!r} does not exist: module {module_name!r} has no {attribute!r}")
    if not callable(function):
        raise RewardError(f"the reward {spec.function!r} must be a function, but it is a {type(function).__name__}")
    return Reward(name=spec.name or attribute, weight=spec.weight, function=function)


def load_all(specs: Iterable[RewardSpec]) -> tuple[Reward, ...]:
    """The rewards of a list, each under its own name.

    Raises:
        RewardError: as `load`, or two have one name.
    """
    rewards = tuple(load(spec) for spec in specs)
    names = [reward.name for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise RewardError(f"two rewards are called {name!r}; give each its own name")
    return rewards


def score(
    rewards: Sequence[Reward], rows: Rows, completions: Sequence[str]
) -> tuple[list[float], dict[str, list[float]]]:
    """Judges completions. A reward that raises is asked again row by row, to find the row that it cannot judge.

    Args:
        rewards: judges with different names.
        rows: the data row of every completion; each judge gets its own copies.
        completions: the texts, B of them.

    Returns:
        B weighted sums, and the B unweighted values of every reward by name.

    Raises:
        RewardError: a reward raised, or did not return one finite number of at most `LARGEST` per completion, or a
            weighted sum is beyond that; names the reward and the row.
    """
    parts = {reward.name: _values(reward, rows, completions) for reward in rewards}
    totals = [
        math.fsum(reward.weight * parts[reward.name][index] for reward in rewards) for index in range(len(completions))
    ]
    for index, total in enumerate(totals):
        if not abs(total) <= LARGEST:
            raise RewardError(
                f"the rewards of {_place(index, rows)} add up to {total} by their weights; the sum must be from "
                f"{-LARGEST:g} to {LARGEST:g}, so lower a weight"
            )
    return totals, parts


def _values(reward: Reward, rows: Rows, completions: Sequence[str]) -> list[float]:
    try:
        result = _ask(reward, rows, completions)
    except (Exception, SystemExit) as error:  # whatever a user's function raises is reported, with the row it is about
        raise RewardError(
            f"the reward {reward.name!r} failed {_blame(reward, rows, completions)}: {_describe(error)}"
        ) from error
    values = _listed(reward, result)
    if not isinstance(values, list | tuple):
        raise RewardError(f"the reward {reward.name!r} returned a {type(result).__name__}; return a list of numbers")
    if len(values) != len(completions):
        raise RewardError(
            f"the reward {reward.name!r} returned {len(values)} values for {len(completions)} completions; "
            f"return one number for each"
        )
    return [_number(reward, value, index, rows) for index, value in enumerate(values)]


def _listed(reward: Reward, result: Any) -> Any:
    """Tensors and arrays as lists; anything else as it is."""
    if not isinstance(result, torch.Tensor | np.ndarray):
        return result
    try:
        return result.tolist()
    except (NotImplementedError, RuntimeError) as error:  # meta and sparse tensors
        raise RewardError(
            f"the reward {reward.name!r} returned a tensor that holds no list of numbers ({_describe(error)})"
        ) from error


def _ask(reward: Reward, rows: Rows, completions: Sequence[str]) -> Any:
    return reward.function([copy.deepcopy(dict(row)) for row in rows], list(completions))


def _blame(reward: Reward, rows: Rows, completions: Sequence[str]) -> str:
    """The row that a failure is about: the first for which the function also fails alone."""
    for index, (row, completion) in enumerate(zip(rows, completions, strict=True)):
        try:
            _ask(reward, [row], [completion])
        except (Exception, SystemExit):
            return f"on {_place(index, rows)}"
    return f"on the batch of {len(completions)} rows, though on none of them alone"


def _number(reward: Reward, value: Any, index: int, rows: Rows) -> float:
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"the reward {reward.name!r} returned a {type(value).__name__} for {_place(index, rows)}; it must be a number"
        )
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction beyond every float
        number = math.inf
    if not abs(number) <= LARGEST:
        raise RewardError(
            f"the reward {reward.name!r} returned {number} for {_place(index, rows)}; it must be finite and from "
            f"{-LARGEST:g} to {LARGEST:g}"
        )
    return number


def _place(index: int, rows: Rows) -> str:
    where = getattr(rows[index], "where", None)
    return f"row {index}" if where is None else f"row {index} ({where})"


def _import(module_name: str, reward: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        raise RewardError(
            f"the reward {reward!r} does not import ({_describe(error)}); it is looked for in the current folder first, "
            f"then among installed packages"
        ) from error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def exact_match(rows: Rows, completions: Sequence[str]) -> list[float]:
    """1 where a completion, spaces around it aside, is the row's `answer`; else 0."""
    return [float(completion.strip() == _answer(row)) for row, completion in zip(rows, completions, strict=True)]


def contains_answer(rows: Rows, completions: Sequence[str]) -> list[float]:
    """1 where the row's `answer` stands anywhere in the completion; else 0."""
    return [float(_answer(row) in completion) for row, completion in zip(rows, completions, strict=True)]


def length_penalty(rows: Rows, completions: Sequence[str]) -> list[float]:
    """Minus the number of characters: with a small weight, the shorter of two equally good completions wins."""
    del rows
    return [-float(len(completion)) for completion in completions]


def _answer(row: Mapping[str, Any]) -> str:
    if "answer" not in row:
        raise ValueError(f"the row has no 'answer', only {', '.join(sorted(row))}")
    return str(row["answer"]).strip()
