"""`laws.optimizer_matches` compares something in every parameter, or says that it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areno_fn.contracts.spec import SGDSpec
from areno_fn.steps.optimizers import sgd
from areno_fn.testing import laws

OURS = sgd(SGDSpec(lr=0.1, momentum=0.9, max_grad_norm=0.0), 10)


def torchs(named: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)


def test_what_is_compared_passes() -> None:
    assert max(laws.optimizer_matches(OURS, torchs, {"w": torch.ones(3), "s": torch.ones(())}, steps=5).values()) < 1e-5


@pytest.mark.parametrize(
    ("params", "changes", "sentence"),
    [
        ({"w": torch.ones(3), "n": None}, {}, "^n is None, of which nothing can be compared; every leaf must be a"),
        ({"w": torch.ones(3), "n": 3}, {}, "^n is 3, of which nothing can be compared"),
        ({"w": torch.ones(3), "n": torch.ones(3, dtype=torch.int64)}, {}, r"^n is i64\[3\], of which nothing can"),
        ({"w": torch.ones(3), "n": torch.ones(0, 4)}, {}, r"^n is f32\[0,4\], of which nothing can be compared"),
        ({}, {}, "^params hold nothing, so that nothing would be compared"),
        ({"w": torch.ones(3)}, {"steps": 0}, "^steps=0 makes none, so that nothing would be compared"),
        ({"w": torch.ones(3)}, {"tolerances": {}}, "^tolerances name no dtype, so that nothing would be compared"),
    ],
)
def test_nothing_to_compare_is_no_pass(params: Any, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        laws.optimizer_matches(OURS, torchs, params, **changes)
