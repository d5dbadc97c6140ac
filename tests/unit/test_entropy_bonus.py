"""The entropy bonus: its number, its gradient on every way through the head, and that it is never left out in silence."""

from __future__ import annotations

import math
import tomllib
from typing import Any

import attrs
import msgspec
import pytest
import recipe_toys
import torch
from e2e import tiny
from toy_policy import Attention, Bigram

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.actions import Actions, Sums
from areno_fn.contracts.batch import Example, Experience
from areno_fn.contracts.errors import JoinError, SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import GRPO, GSPO, PPO, RunSpec, Sampled, Sampling
from areno_fn.engine.plan import plan
from areno_fn.kernels.token_logp import token_logp
from areno_fn.models.decoder import DecoderConfig, init
from areno_fn.models.decoder_policy import DecoderPolicy
from areno_fn.steps.compose import pipeline
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.objectives.separable import entropic, is_entropic, is_separable
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.objectives.value import value_clipped
from areno_fn.steps.token import head, levered
from areno_fn.steps.token.head import decision_log_probs
from areno_fn.steps.token.pack import pack
from areno_fn.steps.token.score import act

CONFIG = DecoderConfig(
    vocab_size=50, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    initializer_range=0.5,
)  # fmt: skip
POLICY = DecoderPolicy(CONFIG)


def test_the_gradient_by_hand() -> None:
    """Of logits (0, ln 3): p = (1/4, 3/4), H = ln 4 - 3/4 ln 3, dH/dl_j = -p_j (log p_j + H)."""
    logits = torch.tensor([[0.0, 3.0]], dtype=torch.float64)
    logits[0, 1] = torch.log(torch.tensor(3.0, dtype=torch.float64))
    _, entropy = token_logp(logits.requires_grad_(), torch.tensor([0]), entropic=True)
    (slope,) = torch.autograd.grad(entropy.sum(), logits)
    number = 3 / 16 * torch.log(torch.tensor(3.0, dtype=torch.float64))
    torch.testing.assert_close(slope, torch.stack([number, -number]).unsqueeze(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_closed_and_certain_tokens_have_no_slope(dtype: torch.dtype) -> None:
    """Where nothing can be chosen, where one token can, and beside tokens that cannot; with any cotangent."""
    logits = torch.tensor([[-torch.inf] * 3, [-torch.inf, 2, -torch.inf], [1, -torch.inf, 1]], dtype=dtype)
    _, entropy = token_logp(logits.requires_grad_(), torch.tensor([0, 1, 2]), entropic=True)
    (slope,) = torch.autograd.grad(entropy, logits, torch.full_like(entropy, 1e6))
    assert torch.isfinite(slope).all() and slope.abs().max() < 1e6 * 4 * torch.finfo(dtype).eps
    assert entropy[:2].tolist() == [0, 0]


def actions(logp: torch.Tensor, entropy: torch.Tensor, weight: torch.Tensor) -> Actions:
    zeros = torch.zeros_like(logp.detach())
    segments = torch.tensor([0, 0, 1, 1])
    return Actions(
        logp=logp, weight=weight, segments=segments, entropy=entropy, old=logp.detach(), advantage=zeros, documents=2
    )


def test_the_loss_by_hand() -> None:
    """Without advantages what is left is -coef times the mean entropy, over tokens or over the means of sequences."""
    logp = torch.full((4,), -1.0, requires_grad=True)
    entropy, weight = torch.tensor([1.0, 2.0, 4.0, torch.nan], requires_grad=True), torch.tensor([1.0, 1.0, 1.0, 0.0])
    for loss, weights in (
        (clipped(entropy_coef=0.3), [1.0, 1.0, 1.0, 0.0]),
        (clipped(entropy_coef=0.3, aggregation="seq_mean_token_mean"), [0.5, 0.5, 1.0, 0.0]),
        (sequence_clipped(entropy_coef=0.3), [0.5, 0.5, 1.0, 0.0]),
    ):
        sums = loss(actions(logp, entropy, weight))
        (slope,) = torch.autograd.grad(sums.total, entropy)
        assert slope.tolist() == pytest.approx([-0.3 * w for w in weights])
        assert sums.total.item() == pytest.approx(-0.3 * sum(w * h for w, h in zip(weights, (1, 2, 4), strict=False)))
        assert sums.stats["policy_loss"][0].item() == 0, "the bonus is not a part of the policy's loss"


def packed(kept: int = 0) -> Experience:
    rows = [
        Example(tokens=tuple(i * 7 % 50 for i in range(9)), trained=(False, *[True] * 8)),
        Example(tokens=tuple(i * 11 % 50 for i in range(6)), trained=(False, False, True, True, False, True)),
    ]
    batch = pack(rows)
    count = batch.targets.shape[0]
    batch = replace(batch, weight=torch.linspace(0, 1.5, count))
    if kept:
        batch = replace(batch, kept=torch.full((count,), kept))
    source = torch.Generator().manual_seed(3)
    noise = torch.randn(2, count, generator=source)
    return Experience(packed=batch, old=noise[0] * 0.3 - 4, advantage=noise[1])


def plainly(logits: torch.Tensor, batch: Experience, temperature: float, coef: float) -> torch.Tensor:
    """The clipped loss of token means with its bonus, as it is written, by softmax and autograd in float64."""
    every = (logits / temperature).log_softmax(-1)
    logp = every.gather(1, batch.packed.targets[:, None])[:, 0]
    ratio = (logp - batch.old).exp()
    gain = torch.minimum(ratio * batch.advantage, ratio.clamp(0.8, 1.2) * batch.advantage)
    return ((-gain + coef * (every.exp() * every).sum(-1)) * batch.packed.weight).sum()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Takes the ways of a GPU, some rows or columns at a time, and notes whether their kernels were asked for the gradient."""
    found: list[bool] = []
    together, apart = levered.linear_token_loss, head.linear_token_logp

    def of_loss(*args: Any, **keywords: Any) -> Any:
        found.append(keywords["entropic"])
        return together(*args, **{**keywords, "chunk": 4 * CONFIG.vocab_size})

    def of_logp(*args: Any, **keywords: Any) -> Any:
        found.append(keywords["entropic"])
        return apart(*args, **keywords)

    monkeypatch.setattr(levered, "linear_token_loss", of_loss)
    monkeypatch.setattr(head, "linear_token_logp", of_logp)
    few = {"entropic": False, "max_logits": 2 * CONFIG.vocab_size}
    monkeypatch.setattr(levered.levered, "__kwdefaults__", few)
    monkeypatch.setattr(head.decision_log_probs, "__kwdefaults__", few)
    monkeypatch.setattr(head, "in_parts", lambda hidden, matrix: hidden.dtype == matrix.dtype)
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_way_through_the_head_has_the_gradient_of_the_formula(temperature: float, parts: list[bool]) -> None:
    params = tree.map(lambda x: x.double(), init(CONFIG, Key.of(2)))
    batch = tree.map(lambda x: x.double() if x.is_floating_point() else x, packed())
    tokens, loss = batch.packed, clipped(entropy_coef=0.4)

    def formula(params: Any) -> torch.Tensor:
        hidden = POLICY.hidden(params, tokens.tokens, tokens.positions, tokens.segments)[tokens.index]
        return plainly(POLICY.logits(params, hidden), batch, temperature, 0.4)

    scoring = act(POLICY, Sampling(temperature=temperature), entropic=True)
    together = pipeline(scoring, loss)
    value, want = value_and_grad(formula)(params)
    for way in (lambda p: together(p, batch).total, lambda p: loss(scoring(p, batch)).total):
        found, slopes = value_and_grad(way)(params)
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-9)
        for one, other in zip(tree.leaves(slopes), tree.leaves(want), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert parts == [True, True]
    assert is_separable(loss)


@pytest.mark.parametrize("limit", [10**9, 100])
@pytest.mark.parametrize("kept", [0, 5])
def test_parts_of_rows_have_the_gradient_of_the_whole(limit: int, kept: int) -> None:
    """Of a policy that is no product, and of distributions that are cut, whose entropy is that of what is left."""
    sampling = Sampling(top_k=kept, temperature=0.8)
    policy = Attention()
    params = policy.init()
    source = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 23, (9,), generator=source)
    hidden = torch.randn(9, policy.width, generator=source)
    weights = torch.randn(2, 9, generator=source)
    count = torch.full((9,), kept) if kept else None

    def loss(moving: Any) -> torch.Tensor:
        logp, entropy = decision_log_probs(
            policy, sampling, moving[0], moving[1], targets, count, entropic=True, max_logits=limit
        )
        return (weights[0] * logp + weights[1] * entropy).sum()

    def plain(moving: Any) -> torch.Tensor:
        logits = policy.logits(moving[0], moving[1]).double() / 0.8
        if kept:
            best = logits.detach().scatter(1, targets[:, None], torch.inf).topk(kept).values[:, -1:]
            inside = (logits.detach() >= best) | (torch.arange(23) == targets[:, None])
            logits = logits.masked_fill(~inside, -torch.inf)
        every = logits.log_softmax(-1)
        entropy = -(every.exp() * torch.where(every > -torch.inf, every, 0.0)).sum(-1)
        return (weights[0] * every.gather(1, targets[:, None])[:, 0] + weights[1] * entropy).sum()

    value, slopes = value_and_grad(loss)((params, hidden))
    want, wanted = value_and_grad(plain)((params, hidden))
    torch.testing.assert_close(value.double(), want, rtol=1e-5, atol=1e-5)
    for one, other in zip(tree.leaves(slopes), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_truncated_distributions_and_sequences_go_their_ways(parts: list[bool]) -> None:
    """Both through the head of a GPU: the first makes its gradients at once, the second cannot."""
    params = init(CONFIG, Key.of(2))
    for sampling, loss, batch in (
        (Sampling(top_k=7), clipped(entropy_coef=0.4), packed(kept=5)),
        (Sampling(), sequence_clipped(entropy_coef=0.4), packed()),
    ):
        scoring = act(POLICY, sampling, entropic=True)
        _, got = value_and_grad(lambda p, s=scoring, f=loss, b=batch: pipeline(s, f)(p, b).total)(params)
        whole = attrs.evolve(POLICY)

        def plain(p: Any, s: Any = sampling, f: Any = loss, b: Any = batch, policy: Any = whole) -> torch.Tensor:
            tokens = b.packed
            hidden = policy.hidden(p, tokens.tokens, tokens.positions, tokens.segments)[tokens.index]
            found = decision_log_probs(
                policy, s, p, hidden, tokens.targets, tokens.kept, entropic=True, max_logits=10**9
            )
            fields = {"weight": tokens.weight, "segments": tokens.segments[tokens.index], "documents": 2}
            total: torch.Tensor = f(
                Actions(logp=found[0], entropy=found[1], old=b.old, advantage=b.advantage, **fields)
            ).total
            return total

        _, want = value_and_grad(plain)(params)
        for one, other in zip(tree.leaves(got), tree.leaves(want), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
    assert parts == [True, True]


def test_a_bonus_without_a_gradient_is_refused() -> None:
    match = (
        r"clipped has a gradient in the entropies, but those of act carry none; "
        r"write act\(policy, sampling, entropic=True\)"
    )
    with pytest.raises(JoinError, match=match):
        pipeline(act(POLICY, Sampling()), clipped(entropy_coef=0.1))
    with pytest.raises(SpecError, match="clipped needs entropy_coef >= 0, received -1"):
        clipped(entropy_coef=-1.0)
    assert not is_entropic(clipped()) and is_entropic(sequence_clipped(entropy_coef=1.0))


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["entropy_coef", "kl_coef"])
@pytest.mark.parametrize("loss", [clipped, sequence_clipped])
def test_coefficients_that_would_make_a_loss_nan_are_refused(loss: Any, name: str, number: float) -> None:
    with pytest.raises(SpecError, match=f"{name}.*{number}"):
        loss(**{name: number})


def test_other_numbers_that_would_make_a_loss_nan_or_nothing_are_refused() -> None:
    for make, words in (
        (lambda: clipped(importance_cap=math.nan), "importance_cap=nan"),
        (lambda: value_clipped(coef=math.inf), "coef=inf"),
        (lambda: preference(math.inf), "a finite beta > 0, received inf"),
        (lambda: clipped(aggregation="constant_length", constant=math.inf), "a finite constant > 0"),
    ):
        with pytest.raises(SpecError, match=words):
            make()


def test_without_a_bonus_entropies_stay_statistics() -> None:
    stage = act(POLICY, Sampling())
    params = tree.map(lambda x: x.requires_grad_(), init(CONFIG, Key.of(2)))
    found = stage(params, packed())
    assert found.logp.requires_grad and not found.entropy.requires_grad
    assert act(POLICY, Sampling(), entropic=True)(params, packed()).entropy.requires_grad


# ------------------------------------------------------------------------------------------ algorithms

DRAWN = Sampling(max_tokens=4)


@pytest.mark.parametrize(
    "spec", [GRPO(samples=2, sampling=DRAWN), GSPO(samples=2, sampling=DRAWN), PPO(sampling=DRAWN)]
)
def test_an_algorithm_with_a_bonus_ends_with_more_entropy(spec: Sampled) -> None:
    ends = []
    for coef in (0.0, 0.5):
        chosen = msgspec.structs.replace(spec, entropy_coef=coef, epochs=4)
        algorithm, state = recipe_toys.begun(chosen, rate=1e-2)
        for _ in range(3):
            state, metrics = algorithm.step(state, recipe_toys.judged(algorithm, state))
        ends.append(metrics["train/entropy"])
    assert ends[1] > ends[0] + 0.01


def test_a_loss_of_one_s_own_asks_for_it() -> None:
    """Marked, it gets entropies with a gradient; the coefficient of the specification is the algorithm's own loss's."""
    seen: list[bool] = []

    def mine(given: Actions) -> Sums:
        seen.append(given.entropy.requires_grad)
        return clipped()(given)

    for wanted in (False, True):
        algorithm, state = recipe_toys.begun(GRPO(samples=2, sampling=DRAWN), entropic(mine) if wanted else mine)
        algorithm.step(state, recipe_toys.judged(algorithm, state))
        assert seen.pop() is wanted


def test_a_specification_names_it() -> None:
    table = tomllib.loads(tiny.SPEC)
    plain = plan(msgspec.convert(table, RunSpec))
    table["phases"][1]["algorithm"]["entropy_coef"] = 0.05
    made = plan(msgspec.convert(table, RunSpec))
    assert set(plain.identity.differences(made.identity)) == {"phases"}


def test_a_policy_of_rows_alone_has_it_too() -> None:
    policy = Bigram()
    params = policy.init(dtype=torch.float64)
    tokens = torch.arange(10) % 11

    def loss(p: Any) -> torch.Tensor:
        hidden = policy.hidden(p, tokens, tokens, tokens * 0)
        _, entropy = decision_log_probs(policy, Sampling(), p, hidden, tokens, entropic=True, max_logits=33)
        return entropy.sum()

    _, slope = value_and_grad(loss)(params)
    _, want = value_and_grad(
        lambda p: -(((every := policy.hidden(p, tokens, tokens, tokens).log_softmax(-1)).exp() * every).sum())
    )(params)
    torch.testing.assert_close(slope.table, want.table)
