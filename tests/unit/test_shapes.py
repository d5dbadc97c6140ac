"""Records of vectors: a column in the place of a vector would broadcast and change a sum unnoticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.actions import Actions, Scores, Sums
from areno_fn.contracts.batch import PackedTokens, Prompts, Rollout
from areno_fn.contracts.errors import RecordError

INTS, FLOATS = torch.arange(3), torch.ones(3)
SCORES = {"logp": FLOATS, "weight": FLOATS, "segments": INTS, "entropy": FLOATS, "documents": 3}
ACTIONS = SCORES | {"old": FLOATS, "advantage": FLOATS, "reference": FLOATS}
PACKED = dict.fromkeys(("tokens", "positions", "segments", "index", "targets", "kept"), INTS)
PACKED |= {"weight": FLOATS, "documents": 3, "longest": 1}
PROMPTS = {"tokens": INTS[:, None], "lengths": INTS + 1, "ids": INTS}
ROLLOUT = {"prompts": Prompts(**PROMPTS), "groups": INTS, "ids": INTS, "lengths": INTS + 1, "finished": INTS > 0}
ROLLOUT |= {"tokens": INTS[:, None], "logp": FLOATS[:, None]}
SUMS: dict[str, Any] = {"total": torch.tensor(1.0), "weight": torch.tensor(2.0), "stats": {}, "peaks": {}}
KINDS = [(Scores, SCORES), (Actions, ACTIONS), (PackedTokens, PACKED), (Prompts, PROMPTS), (Rollout, ROLLOUT)]
FIELDS = [
    (kind, fields, name)
    for kind, fields in KINDS
    for name, value in fields.items()
    if isinstance(value, torch.Tensor) and value.ndim == 1
]


@pytest.mark.parametrize(("kind", "fields", "name"), FIELDS, ids=[f"{k.__name__}.{n}" for k, _, n in FIELDS])
@pytest.mark.parametrize("change", [lambda x: x[:, None], lambda x: x[:2], lambda x: x[0]], ids=["[3,1]", "[2]", "[]"])
def test_every_vector_must_be_one_and_of_the_length_of_the_others(
    kind: Any, fields: dict[str, Any], name: str, change: Any
) -> None:
    kind(**fields)
    with pytest.raises(RecordError, match=name):
        kind(**fields | {name: change(fields[name])})


@pytest.mark.parametrize("name", ["tokens", "positions", "segments", "index", "targets"])
def test_packed_numbers_are_int64(name: str) -> None:
    with pytest.raises(RecordError, match=rf"PackedTokens.{name} must be int64, received f32\[3\]"):
        PackedTokens(**PACKED | {name: FLOATS})


@pytest.mark.parametrize("name", ["total", "weight"])
@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(1), torch.tensor(3), torch.tensor(True)])
def test_sums_are_single_floating_numbers(name: str, wrong: torch.Tensor) -> None:
    with pytest.raises(RecordError, match=rf"Sums.{name} must be one floating number, shape \[\], received"):
        Sums(**SUMS | {name: wrong})


def test_peaks_are_single_floating_numbers() -> None:
    with pytest.raises(RecordError, match=r"Sums.peaks\['far'\] must be one floating number"):
        Sums(**SUMS | {"peaks": {"far": torch.ones(2)}})


def test_a_weight_that_depends_on_the_parameters() -> None:
    """The gradient of total / weight is taken with the weight held fixed, so a moving one would be ignored."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        return Sums(**SUMS | {"total": x.sum(), "weight": x.sum()}).total

    with pytest.raises(RecordError, match="Sums.weight carries a gradient"):
        value_and_grad(loss)(torch.ones(2))
