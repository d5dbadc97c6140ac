"""Accumulation over micro-batches, and the step built on it."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch

from areno_fn import tree
from areno_fn.contracts.actions import Scores, Sums
from areno_fn.contracts.errors import JoinError, RecordError
from areno_fn.contracts.key import Key
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.steps.compose import accumulate, pipeline, train_step
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.optimizers import adamw, scale_by_learning_rate, with_master

Batch = dict[str, torch.Tensor]


def score(params: Any, batch: Batch) -> Scores:
    logp = -(batch["x"] @ params["w"] + params["b"]).square()
    return Scores(
        logp=logp, weight=batch["m"], segments=batch["s"], entropy=torch.zeros_like(logp.detach()), documents=4
    )


OBJECTIVE = pipeline(score, cross_entropy())


def make(dtype: torch.dtype = torch.float64, rows: int = 10) -> tuple[dict[str, torch.Tensor], Batch]:
    generator = torch.Generator().manual_seed(0)
    params = {
        "w": torch.randn(3, generator=generator, dtype=torch.float64).to(dtype),
        "b": torch.randn((), generator=generator, dtype=torch.float64).to(dtype),
    }
    batch = {
        "x": torch.randn(rows, 3, generator=generator, dtype=torch.float64).to(dtype),
        "m": (torch.arange(rows) % 3 != 0).to(dtype),
        "s": torch.arange(rows) % 4,
    }
    return params, batch


def rows(batch: Batch, start: int, stop: int) -> Batch:
    return {name: value[start:stop] for name, value in batch.items()}


def test_equals_autograd_of_the_whole() -> None:
    params, batch = make()
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    sums = OBJECTIVE(leaves, batch)
    (sums.total / sums.weight).backward()
    for split in ((0, 10), (0, 1, 10), (0, 3, 4, 9, 10), tuple(range(11))):
        micro = tuple(rows(batch, a, b) for a, b in itertools.pairwise(split))
        gradient, found = accumulate(OBJECTIVE)(params, micro)
        for name in params:
            torch.testing.assert_close(gradient[name], leaves[name].grad, rtol=1e-13, atol=0)
        torch.testing.assert_close(found.total, sums.total.detach(), rtol=1e-13, atol=0)
        assert found.weight.item() == sums.weight.item() == found.stats["tokens"].item()


def test_L1_a_mean_of_means_is_not_what_comes_out() -> None:
    """Rows of losses [1] and [2, 3, 4]: 2.5, and its gradient, whatever the micro-batches."""

    def losses(params: dict[str, torch.Tensor], batch: torch.Tensor) -> Scores:
        zeros = torch.zeros(len(batch))
        return Scores(logp=-params["w"] * batch, weight=zeros + 1, segments=zeros.long(), entropy=zeros, documents=1)

    params = {"w": torch.tensor(1.0)}
    gradient, sums = accumulate(pipeline(losses, cross_entropy()))(
        params, (torch.tensor([1.0]), torch.tensor([2.0, 3.0, 4.0]))
    )
    assert (sums.total / sums.weight).item() == 2.5 == gradient["w"].item()


def test_L3_ranks_add_before_anyone_divides() -> None:
    """Two ranks with 1 and 3 tokens; each receives the sums of both and divides them once."""
    params, batch = make()
    parts = [rows(batch, 0, 4), rows(batch, 4, 10)]
    gathered: list[tuple[Any, Sums]] = []

    def send(gradient: Any, sums: Sums) -> tuple[Any, Sums]:
        gathered.append((gradient, sums))
        return gradient, sums

    for part in parts:
        accumulate(OBJECTIVE, reduce=send)(params, (part,))

    def over_ranks(gradient: Any, sums: Sums) -> tuple[Any, Sums]:
        return (
            tree.map(torch.add, gathered[0][0], gathered[1][0]),
            replace(
                sums,
                total=gathered[0][1].total + gathered[1][1].total,
                weight=gathered[0][1].weight + gathered[1][1].weight,
            ),
        )

    whole, _ = accumulate(OBJECTIVE)(params, (batch,))
    for part in parts:
        gradient, sums = accumulate(OBJECTIVE, reduce=over_ranks)(params, (part,))
        assert sums.weight.item() == batch["m"].sum().item()
        torch.testing.assert_close(gradient, whole, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("batches", [1, 2])
def test_L5_L7_nothing_to_learn_from_gives_exactly_zero(batches: int) -> None:
    params, batch = make(torch.float32)
    batch = {**batch, "m": torch.zeros_like(batch["m"]), "x": batch["x"].clone().fill_(1e20)}
    gradient, sums = accumulate(OBJECTIVE)(params, (batch,) * batches)
    assert sums.total.item() == 0.0 == sums.weight.item()
    assert all((leaf == 0).all() for leaf in gradient.values())


def test_gradients_of_bfloat16_parameters_add_up_in_float32() -> None:
    """512 equal gradients of 1: a bfloat16 accumulator stops at 256."""

    def linear(params: dict[str, torch.Tensor], batch: torch.Tensor) -> Sums:
        return Sums(total=(params["w"] * batch).sum().float(), weight=torch.ones(()), stats={}, peaks={})

    params = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    gradient, sums = accumulate(linear)(params, (torch.ones(1, dtype=torch.bfloat16),) * 512)
    assert gradient["w"].dtype == torch.float32 and gradient["w"].item() == 1.0 and sums.weight.item() == 512.0


def test_gradients_that_share_storage_are_not_added_twice() -> None:
    def shared(params: dict[str, torch.Tensor], batch: torch.Tensor) -> Sums:
        return Sums(total=(params["a"] + params["b"]).sum() * batch, weight=torch.ones(()), stats={}, peaks={})

    params = {"a": torch.zeros(3), "b": torch.zeros(3)}
    gradient, _ = accumulate(shared)(params, (torch.tensor(2.0), torch.tensor(4.0)))
    assert gradient["a"].tolist() == [3.0] * 3 == gradient["b"].tolist()


def test_leaves_that_do_not_move_have_gradient_zero() -> None:
    params, batch = make()
    gradient, _ = accumulate(OBJECTIVE)({**params, "table": torch.arange(3)}, (batch, batch))
    assert gradient["table"].tolist() == [0, 0, 0] and gradient["w"].abs().sum() > 0


def test_no_argument_is_written_to_and_two_calls_agree() -> None:
    params, batch = make()
    versions = [leaf._version for leaf in tree.leaves((params, batch))]
    first, second = (accumulate(OBJECTIVE)(params, (batch, batch)) for _ in range(2))
    assert [leaf._version for leaf in tree.leaves((params, batch))] == versions
    assert tree.equal(first, second)


def test_one_graph_is_alive_at_a_time() -> None:
    params, batch = make()
    alive: list[weakref.ref[torch.Tensor]] = []
    seen: list[int] = []

    def watched(params: Any, batch: Batch) -> Sums:
        gc.collect()
        seen.append(sum(reference() is not None for reference in alive))
        hidden = (batch["x"] @ params["w"]).exp()
        alive.append(weakref.ref(hidden))
        return Sums(
            total=(hidden * hidden).sum(), weight=torch.ones((), dtype=torch.float64), stats={"h": hidden[:2]}, peaks={}
        )

    _, sums = accumulate(watched)(params, (batch,) * 4)
    assert seen == [0, 0, 0, 0]
    assert not any(leaf.requires_grad for leaf in tree.leaves(sums))


def test_refusals() -> None:
    def nameless(params, batch):  # type: ignore[no-untyped-def]
        return OBJECTIVE(params, batch)

    with pytest.raises(JoinError, match="score returns Scores, but accumulate takes an objective that returns Sums"):
        accumulate(score)  # type: ignore[arg-type]
    with pytest.raises(JoinError, match="nameless does not say what its parameter 'params' takes"):
        accumulate(nameless)
    with pytest.raises(RecordError, match="accumulate was given no micro-batch"):
        accumulate(OBJECTIVE)(make()[0], ())


@pytest.mark.traced
def test_a_gradient_compiles_as_one_graph() -> None:
    params, batch = make(torch.float32)
    derive = accumulate(OBJECTIVE)
    compiled = torch.compile(derive, fullgraph=True, backend="eager")
    assert tree.equal(compiled(params, (batch, batch)), derive(params, (batch, batch)))


# ------------------------------------------------------------------------------------------ the step


def descent(rate: float) -> Optimizer:
    return with_master(scale_by_learning_rate(rate))


def start(optimizer: Optimizer) -> tuple[TrainState, Batch]:
    params, batch = make(torch.float32)
    other, _ = make(torch.float32)
    state = TrainState(
        params={"actor": params, "critic": other},
        optim={"actor": optimizer.init(params), "critic": optimizer.init(other)},
        snapshots={"reference": params},
        counters=Counters(optimizer_step=3, rollout_iteration=5, data_epoch=7),
        key=Key.of(1),
        cursor=Cursor(step=2),
    )
    return state, batch


def test_a_step_moves_one_role_and_one_clock() -> None:
    optimizer = descent(0.1)
    state, batch = start(optimizer)
    gradient, sums = accumulate(OBJECTIVE)(state.params["actor"], (batch,))
    after, metrics = train_step(OBJECTIVE, optimizer)(state, (batch,))
    expected = tree.map(lambda p, g: p + g * torch.tensor(-0.1), state.params["actor"], gradient)
    assert tree.equal(after.params["actor"], expected)
    assert after.params["critic"] is state.params["critic"] and after.optim["critic"] is state.optim["critic"]
    assert after.snapshots is state.snapshots and after.key is state.key and after.cursor is state.cursor
    assert after.counters.optimizer_step == 4 and (after.counters.rollout_iteration, after.counters.data_epoch) == (
        5,
        7,
    )
    assert metrics["train/loss"] == pytest.approx((sums.total / sums.weight).item())
    assert set(metrics) == {"train/loss", "train/entropy", "train/tokens", "train/lr"} and metrics["train/lr"] == 0.1
    assert all(type(value) is float for value in metrics.values())


def test_another_role_and_prefix() -> None:
    optimizer = descent(0.1)
    state, batch = start(optimizer)
    after, metrics = train_step(OBJECTIVE, optimizer, role="critic", prefix="critic")(state, (batch,))
    assert after.params["actor"] is state.params["actor"] and not tree.equal(
        after.params["critic"], state.params["critic"]
    )
    assert "critic/loss" in metrics


def test_a_step_leaves_its_input_alone_and_is_repeatable() -> None:
    optimizer = adamw(AdamWSpec(lr=1e-2), 10)
    state, batch = start(optimizer)
    step = train_step(OBJECTIVE, optimizer)
    copy = tree.map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)
    first, second = step(state, (batch,)), step(state, (batch,))
    assert tree.equal(state, copy) and tree.equal(first, second)


def test_steps_learn() -> None:
    optimizer = adamw(AdamWSpec(lr=5e-2), 100)
    state, batch = start(optimizer)
    step = train_step(OBJECTIVE, optimizer)
    losses = []
    for _ in range(100):
        state, metrics = step(state, (rows(batch, 0, 4), rows(batch, 4, 10)))
        losses.append(metrics["train/loss"])
    assert losses[-1] < 0.1 * losses[0] and metrics["train/grad_norm"] > 0 and metrics["train/lr"] == 5e-2
