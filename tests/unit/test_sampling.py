"""The sampling distribution by hand: temperature, truncation, ties, and both sides of a log-probability."""

from __future__ import annotations

import math

import pytest
import torch
from toy_policy import Bigram

from areno_fn.contracts.batch import Example
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.token import sampling as module
from areno_fn.steps.token.pack import pack
from areno_fn.steps.token.sampling import draw, log_probs, truncate
from areno_fn.steps.token.score import score


def kept(logits: list[float], **fields: float) -> list[int]:
    out = truncate(torch.tensor([logits]), Sampling(**fields)).logits
    return out[0].isfinite().nonzero().flatten().tolist()


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def coordinates(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows), torch.zeros(rows, dtype=torch.int64)


def test_L21_the_temperature_is_applied_on_both_sides() -> None:
    sampling, wanted = Sampling(temperature=0.5), math.log(9 / 10)
    logits = torch.tensor([[0.0, math.log(3)]])
    assert log_probs(logits, torch.tensor([1]), sampling)[0].item() == pytest.approx(wanted, abs=1e-7)

    policy = Bigram(vocab_size=2)
    params = policy.init()
    params = type(params)(table=logits.expand(2, 2), head=params.head)
    scored = score(policy, sampling)(params, pack([Example(tokens=(0, 1), trained=(False, True))]))
    assert scored.logp.item() == pytest.approx(-0.1053605, abs=1e-6)

    ids, positions = coordinates(64)
    tokens, logp, kept = draw(logits.expand(64, 2), sampling, Key.of(1), ids, positions)
    assert 0 < int(tokens.sum()) < 64 and kept is None
    torch.testing.assert_close(logp[tokens == 1], torch.full_like(logp[tokens == 1], wanted))
    torch.testing.assert_close(logp[tokens == 0], torch.full_like(logp[tokens == 0], math.log(1 / 10)))


def test_R1_what_is_recorded_of_token_880_is_not_what_the_likeliest_has() -> None:
    """Log-probabilities -.10 of token 512 and -2.3 of token 880, which are the whole distribution to two digits."""
    logits = torch.full((1, 881), -torch.inf)
    logits[0, 512], logits[0, 880] = -0.10, -2.3
    ids, positions = coordinates(64)
    tokens, logp, _ = draw(logits.expand(64, -1), Sampling(), Key.of(2), ids, positions)
    assert set(tokens.tolist()) == {512, 880}
    for token, value in zip(tokens.tolist(), logp.tolist(), strict=True):
        assert value == pytest.approx({512: -0.10, 880: -2.3}[token], abs=6e-3)


def test_top_k() -> None:
    row = [1.0, 4.0, 2.0, 3.0]
    assert kept(row, top_k=1) == [1]
    assert kept(row, top_k=2) == [1, 3]
    assert kept(row, top_k=4) == kept(row, top_k=400) == kept(row, top_k=0) == [0, 1, 2, 3]


def test_top_p_is_the_smallest_set_that_reaches_the_mass() -> None:
    row = logs(0.1, 0.5, 0.25, 0.15)
    assert kept(row, top_p=0.4) == [1]
    assert kept(row, top_p=0.6) == [1, 2]
    assert kept(row, top_p=0.8) == [1, 2, 3]
    assert kept(row, top_p=0.95) == [0, 1, 2, 3]
    assert kept(row, top_p=1e-9) == [1]


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    row = logs(0.4, 0.3, 0.2, 0.1)  # of the first two, 4/7 and 3/7
    assert kept(row, top_k=2, top_p=0.5) == [0]
    assert kept(row, top_k=2, top_p=0.6) == [0, 1]


def test_top_p_is_taken_after_the_temperature() -> None:
    row = logs(0.6, 0.4)
    assert kept(row, top_p=0.65) == [0, 1]
    assert kept(row, top_p=0.65, temperature=0.5) == [0]  # 0.36 against 0.16 is 0.69 against 0.31


def test_min_p_is_relative_to_the_likeliest() -> None:
    row = logs(0.5, 0.26, 0.2, 0.04)
    assert kept(row, min_p=0.5) == [0, 1]
    assert kept(row, min_p=0.3) == [0, 1, 2]
    assert kept(row, min_p=0.99) == [0]
    assert kept(row, min_p=0.3, top_k=2) == [0, 1]
    assert kept(row, min_p=0.5, top_p=0.9) == [0, 1]


def test_of_tied_tokens_the_first_stay() -> None:
    assert kept([0.0, 1.0, 1.0, 1.0], top_k=2) == [1, 2]
    assert kept([1.0, 1.0, 1.0, 1.0], top_p=0.5) == [0, 1]
    assert kept([2.0, 1.0, 1.0], top_k=2, top_p=0.99) == [0, 1]
    assert kept([1.0, 1.0, 0.0], min_p=0.9) == [0, 1]


def test_a_single_survivor_is_certain() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]]).expand(16, 3)
    for sampling in (Sampling(top_k=1), Sampling(top_p=0.01), Sampling(min_p=0.99)):
        tokens, logp, _ = draw(logits, sampling, Key.of(5), *coordinates(16))
        assert tokens.tolist() == [1] * 16
        assert logp.tolist() == [0.0] * 16
        assert log_probs(logits, tokens, sampling)[1].tolist() == [0.0] * 16


def test_a_vocabulary_of_one() -> None:
    logits = torch.tensor([[3.0]])
    tokens, logp, _ = draw(logits, Sampling(top_k=1, top_p=0.5, min_p=0.5), Key.of(0), *coordinates(1))
    assert tokens.tolist() == [0] and logp.tolist() == [0.0]


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.5, -math.inf]]).expand(200, 4)
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.99, temperature=3.0), Sampling(min_p=0.01)):
        tokens, logp, _ = draw(logits, sampling, Key.of(2), *coordinates(200))
        assert set(tokens.tolist()) == {0, 2}
        assert bool(logp.isfinite().all())


def test_nothing_to_do_returns_the_logits_themselves() -> None:
    logits = torch.zeros(2, 3)
    assert truncate(logits, Sampling()).logits is logits
    assert truncate(logits, Sampling(temperature=0.0, top_k=1)).logits is logits
    assert truncate(logits, Sampling(top_k=3)).logits is logits


def test_temperature_zero_takes_the_likeliest_and_reports_the_models_own_distribution() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    tokens, logp, _ = draw(logits, Sampling(temperature=0.0, top_k=1, top_p=0.1), Key.of(0), *coordinates(1))
    assert tokens.tolist() == [1]
    assert logp.item() == pytest.approx(logits.double().log_softmax(-1)[0, 1].item(), abs=1e-6)


def test_a_target_outside_the_kept_set_stays_finite_in_the_place_of_the_last() -> None:
    logits = torch.tensor(logs(0.5, 0.3, 0.15, 0.05))[None].requires_grad_()
    logp, entropy = log_probs(logits, torch.tensor([3]), Sampling(top_k=2))
    p, q = 0.5 / 0.55, 0.05 / 0.55
    assert logp.item() == pytest.approx(math.log(q), abs=1e-6)
    assert entropy.item() == pytest.approx(-p * math.log(p) - q * math.log(q), abs=1e-6)
    (gradient,) = torch.autograd.grad(logp.sum(), logits)
    torch.testing.assert_close(gradient, torch.tensor([[-p, 0.0, 0.0, 1 - q]]), rtol=0, atol=1e-6)


def test_scoring_keeps_as_many_tokens_as_were_kept_while_drawing() -> None:
    """A rounding error on the edge of top-p must not change a log-probability by more than a rounding error."""
    edge = torch.tensor(logs(0.6, 0.2, 0.2))
    sampling, targets = Sampling(top_p=0.8), torch.tensor([1])
    below, above = (torch.tensor([[by, 0.0, 0.0]]) + edge for by in (-1e-5, 1e-5))
    free = [log_probs(row, targets, sampling)[0].item() for row in (below, above)]
    assert free == [pytest.approx(math.log(0.2), abs=2e-5), pytest.approx(math.log(0.25), abs=2e-5)]
    for kept, wanted in ((1, 0.0), (2, math.log(0.25)), (3, math.log(0.2))):
        for row in (below, above):
            logp, _ = log_probs(row, targets, sampling, torch.tensor([kept]))
            assert logp.item() == pytest.approx(wanted, abs=2e-5)


def test_two_equally_likely_tokens_may_change_places_at_the_edge() -> None:
    sampling, targets, count = Sampling(top_k=2), torch.tensor([2]), torch.tensor([2])
    for shift in (1e-6, 0.0, -1e-6):
        logits = torch.tensor([[1.0, 0.5 + shift, 0.5]])
        logp, _ = log_probs(logits, targets, sampling, count)
        assert logp.item() == pytest.approx(-math.log(1 + math.exp(0.5)), abs=2e-6)


def test_the_gradient_carries_the_temperature() -> None:
    logits = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    (gradient,) = torch.autograd.grad(log_probs(logits, torch.tensor([1]), Sampling(temperature=0.5))[0].sum(), logits)
    torch.testing.assert_close(gradient, torch.tensor([[-0.2, 0.2]]), rtol=0, atol=1e-6)


def test_bfloat16_logits_are_truncated_and_scored_in_float32() -> None:
    logits = torch.tensor([[0.0, 0.5, 1.0, 1.5, 4.0]], dtype=torch.bfloat16)
    targets = torch.tensor([3])
    for sampling in (Sampling(), Sampling(temperature=0.7), Sampling(top_p=0.97), Sampling(min_p=0.05, top_k=4)):
        logp, entropy = log_probs(logits, targets, sampling)
        wide, wide_entropy = log_probs(logits.double(), targets, sampling)
        assert logp.dtype == entropy.dtype == torch.float32
        torch.testing.assert_close(logp.double(), wide, rtol=0, atol=1e-6)
        torch.testing.assert_close(entropy.double(), wide_entropy, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(top_k=2), Sampling(top_p=0.9), Sampling(min_p=0.1), Sampling(temperature=0.5)]
)
def test_nan_stays_nan(sampling: Sampling) -> None:
    logits = torch.tensor([[0.0, math.nan, 1.0], [0.0, 2.0, 1.0]])
    logp, _ = log_probs(logits, torch.tensor([0, 1]), sampling)
    assert logp.isnan().tolist() == [True, False]


def test_drawing_by_parts_is_drawing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Bigram()
    logits = policy.init().table.repeat(4, 1)
    ids, positions = coordinates(logits.shape[0])
    sampling = Sampling(top_p=0.9, temperature=1.3)
    whole = draw(logits, sampling, Key.of(3), ids, positions)
    monkeypatch.setattr(module, "MAX_LOGITS", 5 * policy.vocab_size)
    for a, b in zip(whole, draw(logits, sampling, Key.of(3), ids, positions), strict=True):
        assert torch.equal(a, b)
