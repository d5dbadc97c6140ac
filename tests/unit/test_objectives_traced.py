"""Every kind of objective is one graph for torch.compile, with the numbers that it has without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from objective_toys import OBJECTIVES, PAIRED, Batch, row, some_params, together

from areno_fn import tree
from areno_fn.contracts.actions import Sums

KINDS = (
    "cross_entropy seq_mean_token_mean",
    "clipped token_mean",
    "clipped dual",
    "sequence_clipped",
    "ipo",
    "value_clipped token_mean",
)


@pytest.mark.traced
def test_an_objective_is_one_graph() -> None:
    for name in KINDS:
        torch._dynamo.reset()  # all of them share the code below, whose graphs are counted
        source = torch.Generator().manual_seed(1)
        params = some_params(source)
        documents = 2 if name in PAIRED else 1
        batch = together([row([3] * documents, [1.0, 0.0, 1.0] * documents, source, params) for _ in range(4)])
        count = int(batch.pop("documents"))

        def run(w: torch.Tensor, data: Batch, name: str = name, b: Any = params["b"], count: int = count) -> Sums:
            sums: Sums = OBJECTIVES[name]({"w": w, "b": b}, {**data, "documents": torch.tensor(count)})
            return sums

        compiled = torch.compile(run, fullgraph=True, backend="eager")
        found, expected = (derived(function, params["w"], batch) for function in (compiled, run))
        torch.testing.assert_close(tree.leaves(found), tree.leaves(expected), rtol=1e-12, atol=1e-12)


def derived(function: Any, w: torch.Tensor, batch: Batch) -> tuple[Any, torch.Tensor]:
    """The sums of a function and the gradient of their total."""
    point = w.clone().requires_grad_()
    sums = function(point, batch)
    (slope,) = torch.autograd.grad(sums.total, point)
    return tree.map(lambda x: x.detach(), sums), slope
