"""`strict()`: code under it cannot use the global random state, and uninitialised memory holds NaN."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_DRAW = frozenset(
    "rand rand_like randn randn_like randint randint_like randperm normal bernoulli multinomial poisson dropout "
    "normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_".split()
)


@contextmanager
def strict() -> Iterator[None]:
    """A context in which hidden inputs are errors.

    Draws from torch's global generator are refused where they happen; a global random state (torch, numpy,
    `random`) that was changed some other way is reported at the end. Tensors made by `torch.empty` and its
    kin are filled with NaN, or with the largest value of an integer type, so that an element that nobody
    wrote shows in the result.

    Raises:
        AssertionError: global randomness was used.
    """
    before = global_random_state()
    with _Strict():
        yield
    for name, state in global_random_state().items():
        if not np.array_equal(before[name], state):
            raise AssertionError(f"the global random state of {name} was changed; draw from areno_fn.random with a Key")


def global_random_state() -> dict[str, np.ndarray]:
    """The random states that any code of the process may read, by library."""
    kind, words, *place = np.random.get_state()
    state = {
        "torch": torch.get_rng_state().numpy(),
        "numpy": np.concatenate([np.asarray(words, dtype=np.float64), np.asarray(place, dtype=np.float64)]),
        "random": np.asarray([float(w) for w in random.getstate()[1]]),
    }
    del kind
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["torch.cuda"] = torch.cuda.get_rng_state().numpy()
    return state


class _Strict(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _DRAW and kwargs.get("generator") is None:
            raise AssertionError(
                f"torch.{name} draws from the global random state; draw from areno_fn.random with a Key"
            )
        result = func(*args, **kwargs)
        return _poisoned(result) if name in _EMPTY else result


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)
