"""Rewards: `load` finds what a specification names, `score` asks it and holds it to its word.

A function judges a batch, `(rows, completions)`, a group, `(row, completions)`, or one completion, `(row, completion)`;
the last part of this module holds a few. A `Judge` is asked about the drawn tokens too.
"""

from __future__ import annotations

import abc
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import attrs
import numpy as np
import torch

from areno_fn.contracts.batch import Drawn
from areno_fn.contracts.errors import RewardError
from areno_fn.contracts.spec import FunctionReward, Medium
from areno_fn.world.rewards_call import AT_ONCE, CallError, TookTooLong, call_all, described, same_folder
from areno_fn.world.rewards_form import FORMS, LEGAL, SHOWN, Form, arguments, calls, form_of, is_async, medium_of
from areno_fn.world.rewards_module import import_reward

Rows = Sequence[Mapping[str, Any]]
RewardFunction = Callable[..., Any]
Loaded = dict[str, RewardFunction]
"""What has been made of the classes that specifications name."""

LARGEST = 1e30
"""Rewards become float32; up to this size neither they nor what is computed from them overflows."""


class Judge(abc.ABC):
    """What gives completions a number from their tokens, as a reward model does. It writes to nothing it is given."""

    @abc.abstractmethod
    def judge(self, rows: Rows, completions: Sequence[str], drawn: Sequence[Drawn]) -> Sequence[float]:
        """A number for each completion.

        Args:
            rows: the data row of every completion.
            completions: the texts.
            drawn: the tokens, the prompt's included.
        """


@attrs.frozen(kw_only=True)
class Reward:
    """A judge of completions.

    Attributes:
        name: what its values are called in metrics.
        weight: its factor in the total.
        function: has the parameters `(rows, completions)`, `(row, completions)` or `(row, completion)`, in any order, and
            may be async; or a `Judge`.
        sources: the data sets whose rows it judges; empty for all.
        timeout: seconds that a call may take; 0 for any.
        at_once: calls of an async function that wait together.
    """

    name: str
    weight: float
    function: RewardFunction | Judge
    sources: frozenset[str] = frozenset()
    timeout: float = 0.0
    at_once: int = AT_ONCE

    def judges(self, row: Mapping[str, Any]) -> bool:
        """Whether completions of this row are its business."""
        return not self.sources or getattr(row, "source", "") in self.sources


def load(spec: FunctionReward, loaded: Loaded | None = None, medium: Medium = "text") -> Reward:
    """The reward that a specification names; the current directory is searched first, as with `python -m`.

    Args:
        loaded: what classes have been made into so far; a class that is named twice is made once.
        medium: what it is to judge.

    Raises:
        RewardError: the name is not `package.module:function`, or leads to nothing whose parameters say what it is to be
            called with, or a setting does not apply to it.
    """
    module_name, colon, attribute = spec.function.partition(":")
    if not (module_name and colon and attribute):
        raise RewardError(
            f"the reward {spec.function!r} must be written package.module:function, for example my_rewards:score"
        )
    function = getattr(import_reward(module_name, spec.function), attribute, None)
    if function is None:
        raise RewardError(f"the reward {spec.function!r} does not exist: module {module_name!r} has no {attribute!r}")
    if isinstance(function, type):
        function = _made(function, spec.function, {} if loaded is None else loaded)
    if not callable(function):
        raise RewardError(f"the reward {spec.function!r} must be a function, but it is a {type(function).__name__}")
    _check_call(spec, function, medium)
    return Reward(
        name=spec.name or attribute,
        weight=spec.weight,
        function=function,
        sources=frozenset(spec.data),
        timeout=spec.timeout,
        at_once=spec.concurrency or AT_ONCE,
    )


def load_all(specs: Iterable[FunctionReward], loaded: Loaded | None = None) -> tuple[Reward, ...]:
    """The rewards of a list, each under its own name.

    Args:
        loaded: as for `load`.

    Raises:
        RewardError: as `load`, or two have one name.
    """
    known: Loaded = {} if loaded is None else loaded
    return require_names(tuple(load(spec, known) for spec in specs))


def require_names(rewards: tuple[Reward, ...]) -> tuple[Reward, ...]:
    """The same rewards, when each has a name of its own.

    Raises:
        RewardError: two have one name.
    """
    names = [reward.name for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise RewardError(f"two rewards are called {name!r}; give each its own name")
    return rewards


def _made(kind: type, function: str, loaded: Loaded) -> Any:
    if function not in loaded:
        try:
            with same_folder():
                loaded[function] = kind()
        except (Exception, SystemExit) as error:  # a user's class may raise anything while it is made
            raise RewardError(
                f"the reward {function!r} is a class and cannot be made without arguments ({described(error)})"
            ) from error
    return loaded[function]


def _check_call(spec: FunctionReward, function: RewardFunction, medium: Medium) -> None:
    form = _form(spec.function, function, medium)
    said = medium_of(function)
    if said != medium:
        raise RewardError(
            f"the reward {spec.function!r} judges {SHOWN[said]}, by the names of its parameters, but the model makes "
            f"{SHOWN[medium]}; name a reward with the parameters {LEGAL[medium]}"
        )
    if spec.concurrency and (form == "batch" or not is_async(function)):
        raise RewardError(
            f"the reward {spec.function!r} is called one time after the other, so `concurrency` says nothing; remove it, or "
            f"write an async function of {' or '.join(_said(medium, form) for form in ('group', 'one'))}"
        )


def _said(medium: Medium, form: Form) -> str:
    return f"({', '.join(FORMS[medium, form])})"


def _form(name: str, function: RewardFunction, medium: Medium = "text") -> Form:
    try:
        return form_of(function)
    except TypeError as error:
        raise RewardError(
            f"the reward {name!r} does not say what it is to be called with ({error}); it must have the parameters "
            f"{LEGAL[medium]}, in any order, and a default for every other"
        ) from None


@attrs.frozen
class _Batch:
    """Completions that one reward judges, with their places among all that are judged."""

    rows: Rows
    completions: Sequence[Any]
    drawn: Sequence[Drawn]
    places: Sequence[int]
    group: int

    def place(self, index: int) -> str:
        where = getattr(self.rows[index], "where", None)
        number = self.places[index]
        return f"row {number}" if where is None else f"row {number} ({where})"


def score(
    rewards: Sequence[Reward],
    rows: Rows,
    completions: Sequence[Any],
    group: int = 1,
    drawn: Sequence[Drawn] | None = None,
) -> tuple[list[float], dict[str, list[float]]]:
    """Judges completions. A reward of batches that raises is asked again row by row, to find the row it cannot judge.

    One that raises a RewardError is believed.

    Args:
        rewards: judges with different names.
        rows: the data row of every completion; each judge gets its own copies.
        completions: the texts or pictures, B of them; those of one row stand together.
        group: completions of each row.
        drawn: the tokens of every completion and its prompt, which a `Judge` is asked about.

    Returns:
        B weighted sums of what the judges of each row say, 0 where it has none; and by name the unweighted values of
        every reward, of the completions that it judged, where there are any.

    Raises:
        RewardError: a reward raised or took too long, or did not return one finite number of at most `LARGEST` per
            completion, or a weighted sum is beyond that; names the reward and the row.
    """
    terms: list[list[float]] = [[] for _ in completions]
    parts: dict[str, list[float]] = {}
    for reward in rewards:
        places = [index for index, row in enumerate(rows) if reward.judges(row)]
        batch = _Batch(
            [rows[i] for i in places],
            [completions[i] for i in places],
            [] if drawn is None else [drawn[i] for i in places],
            places,
            group,
        )
        values = _values(reward, batch) if places else []
        parts |= {reward.name: values} if places else {}
        for index, value in zip(places, values, strict=True):
            terms[index].append(reward.weight * value)
    totals = [math.fsum(own) for own in terms]
    whole = _Batch(rows, completions, drawn or (), range(len(rows)), group)
    for index, total in enumerate(totals):
        if not abs(total) <= LARGEST:
            raise RewardError(
                f"the rewards of {whole.place(index)} add up to {total} by their weights; the sum must be from "
                f"{-LARGEST:g} to {LARGEST:g}, so lower a weight"
            )
    return totals, parts


def texts(row: Mapping[str, Any]) -> tuple[str, str]:
    """No text, and the row's `answer` or `response`."""
    return "", str(row.get("answer", row.get("response", "")))


def rehearse(
    rewards: Sequence[Reward],
    rows: Rows,
    samples: Callable[[Mapping[str, Any]], tuple[Any, Any]] = texts,
    most: int = 1,
) -> dict[str, tuple[float, float]]:
    """Asks functions once, about the first row of every data set, or the first ones.

    Args:
        rewards: those that are models are left out.
        rows: of the data.
        samples: from a row to a sample of nothing, and to one of what would be right.
        most: rows of a data set.

    Returns:
        By name the values of these two for the first row that the reward judges, or their means over the first `most`.

    Raises:
        RewardError: as `score`.
    """
    of_source: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        own = of_source.setdefault(getattr(row, "source", ""), [])
        own += [row] if len(own) < most else []
    firsts = [row for own in of_source.values() for row in own]
    tried = [sample for row in firsts for sample in samples(row)]
    asked = [reward for reward in rewards if not isinstance(reward.function, Judge)]
    _, parts = score(asked, [row for row in firsts for _ in range(2)], tried, group=2)
    shown = {name: values[: 2 * most] for name, values in parts.items()}
    return {name: (fmean(values[::2]), fmean(values[1::2])) for name, values in shown.items()}


def _values(reward: Reward, batch: _Batch) -> list[float]:
    function = reward.function
    values = _judged(function, batch) if isinstance(function, Judge) else _called(reward, function, batch)
    return [_number(reward, value, index, batch) for index, value in enumerate(values)]


def _judged(judge: Judge, batch: _Batch) -> Sequence[float]:
    if len(batch.drawn) != len(batch.completions):
        raise RewardError(
            f"a reward model judges tokens, but {len(batch.drawn)} were given of {len(batch.completions)} completions; "
            f"pass `drawn`"
        )
    return judge.judge(batch.rows, batch.completions, batch.drawn)


def _called(reward: Reward, function: RewardFunction, batch: _Batch) -> list[Any]:
    form = _form(reward.name, function)
    pieces = calls(form, len(batch.completions), batch.group)
    try:
        results = _ask(reward, function, batch, pieces)
    except CallError as failure:
        if isinstance(failure.error, RewardError):  # it says itself what is wrong
            raise failure.error from None
        raise _failed(reward, function, batch, pieces, failure) from failure.error
    return [
        value for piece, result in zip(pieces, results, strict=True) for value in _of_call(reward, form, piece, result)
    ]


def _ask(reward: Reward, function: RewardFunction, batch: _Batch, pieces: Sequence[slice]) -> list[Any]:
    given = [arguments(function, batch.rows[piece], batch.completions[piece]) for piece in pieces]
    return call_all(function, given, reward.timeout, reward.at_once)


def _of_call(reward: Reward, form: Form, piece: slice, result: Any) -> Sequence[Any]:
    """The values of one call, as many as it judged completions."""
    values, count = _listed(reward, result), piece.stop - piece.start
    if form == "one":
        return [values]
    if not isinstance(values, list | tuple):
        raise RewardError(f"the reward {reward.name!r} returned a {type(result).__name__}; return a list of numbers")
    if len(values) != count:
        raise RewardError(
            f"the reward {reward.name!r} returned {len(values)} values for {count} {_shown(reward)}; return one number for each"
        )
    return values


def _listed(reward: Reward, result: Any) -> Any:
    """Tensors and arrays as lists; anything else as it is."""
    if not isinstance(result, torch.Tensor | np.ndarray):
        return result
    try:
        return result.tolist()
    except (NotImplementedError, RuntimeError) as error:  # meta and sparse tensors
        raise RewardError(
            f"the reward {reward.name!r} returned a tensor that holds no list of numbers ({described(error)})"
        ) from error


def _failed(
    reward: Reward, function: RewardFunction, batch: _Batch, pieces: Sequence[slice], failure: CallError
) -> RewardError:
    form = form_of(function)
    if isinstance(failure.error, TookTooLong):
        return RewardError(
            f"the reward {reward.name!r} gave no answer {_where(reward, form, batch, pieces, failure)} within its timeout of "
            f"{reward.timeout:g} s; raise `timeout`, or see what it waits for"
        )
    known = form != "batch" and failure.call is not None
    index = pieces[failure.call].start if known and failure.call is not None else _blamed(reward, function, batch)
    if index is None:
        where = f"on the batch of {len(batch.completions)} rows, though on none of them alone"
        return RewardError(f"the reward {reward.name!r} failed {where}: {described(failure.error)}")
    lacking = _lacking(failure.error, batch.rows[index])
    return RewardError(
        f"the reward {reward.name!r} failed on {batch.place(index)}: {described(failure.error)}{lacking}"
    )


def _where(reward: Reward, form: Form, batch: _Batch, pieces: Sequence[slice], failure: CallError) -> str:
    """The samples that a call was about."""
    if failure.call is None or form == "batch":
        return f"on the batch of {len(batch.completions)} {_shown(reward)}"
    return f"on {batch.place(pieces[failure.call].start)}"


def _shown(reward: Reward) -> str:
    """What a function judges, in words."""
    return SHOWN[medium_of(reward.function)]  # type: ignore[arg-type]  # a Judge returns what it is asked


def _blamed(reward: Reward, function: RewardFunction, batch: _Batch) -> int | None:
    """The row that a failure is about: the first for which the function also fails alone."""
    for index in range(len(batch.completions)):
        try:
            _ask(reward, function, batch, [slice(index, index + 1)])
        except CallError:
            return index
    return None


def _lacking(error: BaseException, row: Mapping[str, Any]) -> str:
    """What a row has, where a function looked for something that it has not."""
    name = error.args[0] if isinstance(error, KeyError) and len(error.args) == 1 else None
    lacks = isinstance(name, str) and name not in row
    return f"; the row has {', '.join(sorted(map(str, row)))}" if lacks else ""


def _number(reward: Reward, value: Any, index: int, batch: _Batch) -> float:
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"the reward {reward.name!r} returned a {type(value).__name__} for {batch.place(index)}; it must be a number"
        )
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction beyond every float
        number = math.inf
    if not abs(number) <= LARGEST:
        raise RewardError(
            f"the reward {reward.name!r} returned {number} for {batch.place(index)}; it must be finite and from "
            f"{-LARGEST:g} to {LARGEST:g}"
        )
    return number


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
