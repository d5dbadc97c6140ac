"""What a phase computes again in its backward pass: memory for time, and nothing else."""

from __future__ import annotations

import tomllib
from typing import Any

import msgspec
import pytest
import torch
from e2e import tiny, tiny_flow

from areno_fn import tree
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import RunSpec
from areno_fn.engine.plan import Plan, plan
from areno_fn.engine.start import initial_state
from areno_fn.models.decoder_forward import is_again


def planned(text: str, remat: int) -> Plan:
    table = tomllib.loads(text)
    for phase in table["phases"]:
        phase["remat"] = remat
    table["model"]["config"]["num_hidden_layers"] = 3
    return plan(msgspec.convert(table, RunSpec))


def test_which_layers_are_computed_again() -> None:
    assert [[is_again(layer, every) for layer in range(5)] for every in (0, 1, 2, 9)] == [
        [False] * 5,
        [True] * 5,
        [True, False, True, False, True],
        [True, False, False, False, False],
    ]


def test_every_policy_makes_the_same_updates() -> None:
    """Supervised and by samples, bit for bit; a run may therefore be continued under another one."""
    plans = [planned(tiny.SPEC, remat) for remat in (0, 1, 2)]
    assert len({str(made.identity) for made in plans}) == 1
    ends: list[Any] = []
    for made in plans:
        phase = made.phases[0]
        state = phase.algorithm.begin(initial_state(made))
        batch = made.medium.batch(phase.examples, list(range(8)), phase.spec)
        ends.append(phase.algorithm.step(state, batch))
    assert ends[0][1] == ends[1][1] == ends[2][1]
    assert tree.equal(ends[0][0], ends[1][0]) and tree.equal(ends[0][0], ends[2][0])


def test_less_is_kept() -> None:
    """Tensors that autograd saves for the backward pass, by their bytes."""
    sizes = []
    for remat in (0, 2, 1):
        made = planned(tiny.SPEC, remat)
        phase, policy = made.phases[0], made.model.policy.computing_again(remat)
        packed = made.medium.batch(phase.examples, list(range(8)), phase.spec)[0]
        params = tree.map(lambda x: x.requires_grad_(), initial_state(made).params["actor"])
        seen: dict[int, int] = {}

        def keep(x: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            policy.hidden(params, packed.tokens, packed.positions, packed.segments)
        sizes.append(sum(seen.values()))
    assert sizes[0] > sizes[1] > sizes[2]


def test_models_that_cannot_are_refused() -> None:
    table = tomllib.loads(tiny_flow.SPEC)
    table["phases"][0]["remat"] = 1
    name = table["phases"][0]["name"]
    match = rf"phases.{name}.remat: the layers of this model cannot be computed again one by one; remove it"
    with pytest.raises(SpecError, match=match):
        plan(msgspec.convert(table, RunSpec))
