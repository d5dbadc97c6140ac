"""Every public law passes on a part that obeys it and fails on one with a planted fault."""

from __future__ import annotations

import random as stdlib_random
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from toy_policy import Attention, Bigram

from areno_fn import random, tree
from areno_fn.contracts.actions import Scores, Sums
from areno_fn.contracts.batch import Prompts
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import record
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.compose import pipeline
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.token.score import score
from areno_fn.testing import laws, strategies
from areno_fn.testing.strict import strict

POLICY = Bigram(vocab_size=32)
PARAMS = POLICY.init()
OBJECTIVE = pipeline(score(POLICY, Sampling()), cross_entropy())


@record
class Value:
    x: torch.Tensor
    count: int = 0


# ------------------------------------------------------------------------------------------------ pure


def test_pure_returns_what_a_pure_step_returns() -> None:
    def step(value: Value, by: float) -> tuple[Value, float]:
        noise = random.normal(Key.of(1), torch.arange(3))
        return Value(x=value.x * by + noise, count=value.count + 1), by

    result, by = laws.pure(step, Value(x=torch.ones(3)), 2.0)
    assert result.count == 1 and by == 2.0


def test_pure_accepts_a_result_with_nan() -> None:
    laws.pure(lambda x: x / 0 * 0, torch.ones(2))


_calls: list[int] = []


def counting(value: Value) -> torch.Tensor:
    _calls.append(1)
    return value.x + len(_calls)


def writing(value: Value) -> torch.Tensor:
    value.x.add_(1)
    return value.x.clone()


def drawing(value: Value) -> torch.Tensor:
    return value.x + torch.rand(3)


def seeding(value: Value) -> torch.Tensor:
    torch.manual_seed(1)
    return value.x


def drawing_with_numpy(value: Value) -> torch.Tensor:
    return value.x + float(np.random.rand())


def drawing_with_python(value: Value) -> torch.Tensor:
    return value.x + stdlib_random.random()


def forgetting_an_element(value: Value) -> torch.Tensor:
    result = torch.empty_like(value.x)
    result[1:] = value.x[1:]
    return result.nan_to_num(float(len(_calls))) if _calls.append(1) is None else result


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (counting, "two calls with equal arguments differ at <root>: 3 of 3 elements differ"),
        (writing, r"the step wrote to its argument 0 at x: 3 of 3 elements differ"),
        (drawing, r"torch\.rand draws from the global random state"),
        (seeding, "the global random state of torch was changed"),
        (drawing_with_numpy, "the global random state of numpy was changed"),
        (drawing_with_python, "the global random state of random was changed"),
        (forgetting_an_element, "two calls with equal arguments differ at <root>: 1 of 3 elements differ"),
    ],
)
def test_pure_catches(step: Callable[[Value], torch.Tensor], message: str) -> None:
    # away from any seed's first state, so that a step which seeds changes it
    torch.rand(1)
    with pytest.raises(AssertionError, match=message):
        laws.pure(step, Value(x=torch.full((3,), 0.5)))


def test_arrays_of_numpy_are_compared_and_copied_as_tensors_are() -> None:
    given = {"x": np.arange(3.0), "seen": {1, 2}, "bytes": bytearray(b"ab"), "nan": np.array([np.nan])}
    result = laws.pure(lambda value, by: {"y": value["x"] * by, "nan": value["nan"] + 0}, given, np.float64(2.0))
    assert result["y"].tolist() == [0.0, 2.0, 4.0]

    def adding(value: Any) -> Any:
        value["x"] += 1
        return value["x"].copy()

    with pytest.raises(AssertionError, match="the step wrote to its argument 0 at x: 3 of 3 elements differ"):
        laws.pure(adding, given)
    with pytest.raises(AssertionError, match="the step wrote to its argument 0 at seen"):
        laws.pure(lambda value: value["seen"].add(3), given)
    with pytest.raises(AssertionError, match="the step wrote to its argument 0 at bytes"):
        laws.pure(lambda value: value["bytes"].append(3), given)
    assert given["x"].tolist() == [0.0, 1.0, 2.0] and given["seen"] == {1, 2}

    counted: list[int] = []

    def counting_up(value: Any) -> Any:
        counted.append(1)
        return value["x"] + (np.arange(3) == 1) * len(counted)

    with pytest.raises(AssertionError, match="two calls with equal arguments differ at <root>: 1 of 3 elements differ"):
        laws.pure(counting_up, given)
    with pytest.raises(AssertionError, match=r"float64 \(1,\) against float64 \(2,\)"):
        laws.pure(lambda value: np.zeros(counted.append(1) or len(counted) - 2), given)


# ------------------------------------------------------------------------------------------------ exact_under_split


@given(strategies.split_batches())
def test_a_sum_is_exact_under_any_split(drawn: Any) -> None:
    whole, parts = drawn
    laws.exact_under_split(OBJECTIVE, PARAMS, whole, parts)


def mean_loss(scores: Scores) -> Sums:
    """L1: the mean of every micro-batch, which weighs short ones too much."""
    mean = -(scores.logp * scores.weight).sum() / scores.weight.sum()
    return Sums(total=mean, weight=torch.tensor(1.0), stats={}, peaks={})


def mean_with_its_weight(scores: Scores) -> Sums:
    mean = -(scores.logp * scores.weight).sum() / scores.weight.sum()
    return Sums(total=mean, weight=scores.weight.sum(), stats={}, peaks={})


def mean_statistic(scores: Scores) -> Sums:
    return Sums(
        total=-scores.logp.sum(),
        weight=scores.weight.sum(),
        stats={"logp": scores.logp.mean(0, keepdim=True)},
        peaks={},
    )


def gradient_of_the_batch_size(scores: Scores) -> Sums:
    """The value is a sum, but its gradient is divided."""
    total = -(scores.logp * scores.weight).sum()
    slope = total / scores.weight.sum()
    return Sums(total=total.detach() + slope - slope.detach(), weight=scores.weight.sum(), stats={}, peaks={})


@pytest.mark.parametrize(
    ("stage", "what"),
    [
        (mean_loss, "changes total"),
        (mean_with_its_weight, "changes total"),
        (mean_statistic, r"changes stats\['logp'\]"),
        (gradient_of_the_batch_size, "changes the gradient"),
    ],
)
def test_L1_exact_under_split_catches_a_mean(stage: Callable[[Scores], Sums], what: str) -> None:
    rows = [((1, 2), (1.0,)), ((3, 4, 5, 6), (1.0, 1.0, 1.0))]
    whole, parts = strategies.packed(rows), [strategies.packed([row]) for row in rows]
    laws.exact_under_split(OBJECTIVE, PARAMS, whole, parts)
    with pytest.raises(AssertionError, match=f"split 1 into 2 parts {what}"):
        laws.exact_under_split(pipeline(score(POLICY, Sampling()), stage), PARAMS, whole, [whole], parts)


# ------------------------------------------------------------------------------------------------ gradient


@given(strategies.packed_tokens())
def test_the_gradient_of_the_objective_is_that_of_its_value(batch: Any) -> None:
    laws.gradient(OBJECTIVE, PARAMS, batch)


def test_gradient_takes_scalars_records_and_integers() -> None:
    laws.gradient(lambda v, scale: (v.x.sin() * scale).sum(), Value(x=torch.arange(3.0), count=2), torch.tensor(2.0))
    laws.gradient(lambda p: torch.ones((), dtype=torch.float64), {"unused": torch.ones(2)})


class Halved(torch.autograd.Function):
    """A square whose derivative lacks the factor 2."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda p: Halved.apply(p["a"]).sum(),
        lambda p: (p["a"].detach() * p["a"]).sum(),
        lambda p: (p["a"] + (p["a"] ** 3).detach()).sum(),
        lambda p: torch.where(p["a"] > 100, p["a"] / 0, p["a"]).sum() * torch.tensor(float("nan")),
    ],
)
def test_gradient_catches_a_wrong_derivative(function: Callable[[Any], torch.Tensor]) -> None:
    with pytest.raises(AssertionError, match=r"along direction 0 the gradient gives .*, but the value changes by"):
        laws.gradient(function, {"a": torch.tensor([0.3, -1.2, 2.0])})


# ------------------------------------------------------------------------------------------------ rollout


PROMPTS = Prompts(
    tokens=torch.tensor([[1, 2, 3], [4, 0, 0], [5, 6, 0]]), lengths=torch.tensor([3, 1, 2]), ids=torch.tensor([7, 0, 3])
)


@given(
    strategies.prompts(vocabulary=23, max_rows=3, max_length=4), strategies.keys(), strategies.sampling(max_tokens=4)
)
def test_a_rollout_is_what_training_recomputes(prompts: Prompts, key: Key, sampling: Sampling) -> None:
    policy = Attention()
    laws.rollout_matches_training(policy, policy.init(), prompts, key, sampling, stop=(2, 3))


@attrs.frozen
class Hotter(Bigram):
    """L21: the rollout sees logits of another temperature than training does."""

    def prefill(self, params, tokens, lengths, capacity):
        logits, cache = Bigram.prefill(self, params, tokens, lengths, capacity)
        return logits * 1.5, cache


@attrs.frozen
class Stale(Bigram):
    """R3: the first token after the prompt is answered from old weights."""

    def decode(self, params, tokens, cache):
        return Bigram.decode(self, tree.map(lambda x: x + x.sin() * 0.01, params), tokens, cache)


@attrs.frozen
class Crowded(Bigram):
    """R2: a row's logits depend on how many rows are decoded with it."""

    def decode(self, params, tokens, cache):
        logits, cache = Bigram.decode(self, params, tokens, cache)
        return logits.roll(tokens.shape[0] - 2, dims=-1) if tokens.shape[0] > 2 else logits, cache


@pytest.mark.parametrize("policy", [Hotter(), Stale(), Crowded()])
def test_R3_L21_rollout_matches_training_catches(policy: Bigram) -> None:
    sampling = Sampling(max_tokens=6)
    laws.rollout_matches_training(Bigram(), Bigram().init(), PROMPTS, Key.of(1), sampling)
    with pytest.raises(
        AssertionError, match=r"token \d+ (at position|of sequence) \d+ was recorded with log-probability"
    ):
        laws.rollout_matches_training(policy, policy.init(), PROMPTS, Key.of(1), sampling)


def test_a_sequence_that_depends_on_its_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys made of the row's place in the batch, not of its name."""
    honest = laws.sampler

    def by_place(policy: Any, stop: Any) -> Callable[..., Any]:
        draw = honest(policy, stop)

        def rollout(params: Any, prompts: Prompts, *args: Any, **kwargs: Any) -> Any:
            places = torch.arange(prompts.ids.shape[0])
            return draw(params, Prompts(tokens=prompts.tokens, lengths=prompts.lengths, ids=places), *args, **kwargs)

        return rollout

    monkeypatch.setattr(laws, "sampler", by_place)
    with pytest.raises(AssertionError, match=r"sequence \d+ of the batch is .*, but drawn without the others it is"):
        laws.rollout_matches_training(Bigram(), Bigram().init(), PROMPTS, Key.of(1), Sampling(max_tokens=6))


# ------------------------------------------------------------------------------------------------ strict


def test_strict_fills_what_nobody_wrote() -> None:
    with strict():
        assert bool(torch.empty(2, 3).isnan().all())
        assert bool(torch.empty_like(torch.zeros(2)).isnan().all())
        assert bool(torch.zeros(1).new_empty(2).isnan().all())
        assert bool(torch.empty_strided((2, 2), (2, 1)).isnan().all())
        assert torch.empty(1, dtype=torch.int64).item() == 2**63 - 1
        assert torch.empty(1, dtype=torch.bool).item() is True
        assert torch.empty(0).shape == (0,)


DRAWS = {
    "rand": lambda: torch.rand(2),
    "randn": lambda: torch.randn(2),
    "randint": lambda: torch.randint(0, 2, (2,)),
    "randperm": lambda: torch.randperm(3),
    "rand_like": lambda: torch.rand_like(torch.zeros(1)),
    "randn_like": lambda: torch.randn_like(torch.zeros(1)),
    "normal": lambda: torch.normal(torch.zeros(1), torch.ones(1)),
    "bernoulli": lambda: torch.bernoulli(torch.full((2,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(3), 1),
    "normal_": lambda: torch.zeros(1).normal_(),
    "uniform_": lambda: torch.zeros(1).uniform_(),
    "exponential_": lambda: torch.zeros(1).exponential_(),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(3)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_strict_refuses_a_draw_where_it_happens(name: str) -> None:
    with pytest.raises(AssertionError, match=rf"torch\.{name} draws from the global random state"), strict():
        DRAWS[name]()


def test_strict_allows_a_generator_of_its_own_and_keys() -> None:
    with strict():
        torch.rand(2, generator=torch.Generator().manual_seed(0))
        random.uniform(Key.of(0), torch.arange(3))


def test_strict_lets_errors_through() -> None:
    with pytest.raises(ZeroDivisionError), strict():
        _ = 1 / 0
