"""Laws of the sampling distribution: against float64 sets, exact probabilities, and any other batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Sampling
from areno_fn.steps.token.sampling import draw, log_probs, truncate
from areno_fn.testing import strategies

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.9]),
)
rows_of_logits = st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=1, max_size=12)


def by_sets(logits: list[float], sampling: Sampling, require: Callable[[bool], object] = assume) -> dict[int, float]:
    """The distribution by its definition, in Python's own floats; examples that stand on an edge are refused."""
    weights = {i: math.exp(x / sampling.temperature) for i, x in enumerate(logits)}
    order = sorted(weights, key=lambda i: (-weights[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    mass, total, stay = 0.0, sum(weights[i] for i in order), []
    for i in order:
        require(abs(mass - sampling.top_p) > 1e-5)
        if mass >= sampling.top_p:
            break
        stay.append(i)
        mass += weights[i] / total
    require(all(abs(weights[i] / weights[order[0]] - sampling.min_p) > 1e-6 for i in stay))
    stay = [i for i in stay if weights[i] >= sampling.min_p * weights[order[0]]]
    total = sum(weights[i] for i in stay)
    return {i: weights[i] / total for i in stay}


@given(rows_of_logits, samplings)
def test_truncation_keeps_the_defined_set(logits: list[float], sampling: Sampling) -> None:
    wanted = by_sets(logits, sampling)
    out, count = truncate(torch.tensor([logits]), sampling)
    assert out[0].isfinite().nonzero().flatten().tolist() == sorted(wanted)
    assert count is None or count.tolist() == [len(wanted)]


@given(rows_of_logits, samplings)
def test_log_probabilities_and_entropy_are_those_of_the_definition(logits: list[float], sampling: Sampling) -> None:
    wanted = by_sets(logits, sampling)
    tokens = torch.tensor(sorted(wanted))
    logp, entropy = log_probs(torch.tensor([logits]).expand(len(wanted), -1), tokens, sampling)
    exact = torch.tensor([math.log(wanted[int(i)]) for i in tokens], dtype=torch.float64)
    torch.testing.assert_close(logp.double(), exact, rtol=1e-6, atol=2e-6)
    exact_entropy = -sum(p * math.log(p) for p in wanted.values())
    torch.testing.assert_close(entropy.double(), torch.full_like(exact, exact_entropy), rtol=1e-5, atol=2e-6)


@given(rows_of_logits, samplings, st.data())
def test_a_token_of_the_set_is_scored_as_if_nothing_were_added(
    logits: list[float], sampling: Sampling, data: st.DataObject
) -> None:
    row = torch.tensor([logits])
    free = truncate(row, sampling).logits
    inside = data.draw(st.sampled_from(free[0].isfinite().nonzero().flatten().tolist()))
    assert torch.equal(truncate(row, sampling, keep=torch.tensor([inside])).logits, free)


@given(st.integers(1, 12), strategies.keys(), samplings, st.data())
def test_a_draw_is_a_function_of_key_id_and_position(
    rows: int, key: Key, sampling: Sampling, data: st.DataObject
) -> None:
    source = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    logits = torch.randn(rows, 13, generator=source)
    ids = torch.randint(-(2**40), 2**40, (rows,), generator=source)
    positions = torch.randint(0, 5000, (rows,), generator=source)
    tokens, logp, _ = draw(logits, sampling, key, ids, positions)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=20)))
    again, again_logp, _ = draw(logits[chosen], sampling, key, ids[chosen], positions[chosen])
    assert torch.equal(again, tokens[chosen])
    assert torch.equal(again_logp, logp[chosen])


@given(rows_of_logits, strategies.keys(), samplings)
def test_what_is_drawn_has_the_recorded_probability(logits: list[float], key: Key, sampling: Sampling) -> None:
    wanted = by_sets(logits, sampling)
    ids = torch.arange(30)
    tokens, logp, _ = draw(torch.tensor([logits]).expand(30, -1), sampling, key, ids, ids * 7)
    exact = torch.tensor([math.log(wanted[int(i)]) for i in tokens], dtype=torch.float64)
    torch.testing.assert_close(logp.double(), exact, rtol=1e-6, atol=2e-6)


CRITICAL = {2: 13.82, 3: 16.27, 4: 18.47, 6: 22.46, 24: 51.18}
"""Quantiles of the chi-square distribution at 0.999, by degrees of freedom."""


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_follow_the_distribution_over_ids_and_over_positions() -> None:
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, -0.4, 0.9, 0.5])
    many = 40_000
    along, fixed = torch.arange(many), torch.zeros(many, dtype=torch.int64)
    for sampling in (Sampling(), Sampling(temperature=0.6, top_k=5), Sampling(top_p=0.8), Sampling(min_p=0.35)):
        wanted = by_sets(logits.tolist(), sampling, require=bool)
        for ids, positions in ((along, fixed), (fixed + 11, along)):
            tokens, *_ = draw(logits.expand(many, -1), sampling, Key.of(20), ids, positions)
            counts = tokens.bincount(minlength=7)
            assert {i for i in range(7) if counts[i]} == set(wanted)
            inside = sorted(wanted)
            exact = torch.tensor([wanted[i] for i in inside])
            assert chi_square(counts[inside], exact) < CRITICAL[len(inside) - 1]


def test_draws_of_blocks_and_of_tokens_in_them_follow_the_distribution() -> None:
    many = 6_000
    logits = 2 * torch.randn(700, generator=torch.Generator().manual_seed(4))
    tokens, logp, _ = draw(logits.expand(many, -1), Sampling(), Key.of(21), torch.arange(many), torch.full((many,), 3))
    exact = logits.double().softmax(0)
    torch.testing.assert_close(logp.double(), exact[tokens].log(), rtol=1e-6, atol=1e-5)
    for bins in (torch.arange(700) % 25, (torch.arange(700) // 28)):  # across the three blocks, and along them
        counts, wanted = tokens.new_zeros(25), exact.new_zeros(25)
        counts.index_add_(0, bins[tokens], torch.ones_like(tokens))
        assert chi_square(counts, wanted.index_add_(0, bins, exact)) < CRITICAL[24]


def test_draws_at_neighbouring_coordinates_are_independent() -> None:
    many, size = 40_000, 5
    logits, sampling, along = torch.zeros(many, size), Sampling(), torch.arange(many)
    here, *_ = draw(logits, sampling, Key.of(8), along, along * 0)
    for ids, positions in ((along + 1, along * 0), (along, along * 0 + 1)):
        there, *_ = draw(logits, sampling, Key.of(8), ids, positions)
        pairs = (here * size + there).bincount(minlength=size * size)
        assert chi_square(pairs, torch.full((size * size,), 1 / size**2)) < CRITICAL[24]


def test_other_keys_draw_otherwise() -> None:
    logits, ids = torch.zeros(64, 50), torch.arange(64)
    first, *_ = draw(logits, Sampling(), Key.of(0), ids, ids)
    second, *_ = draw(logits, Sampling(), Key.of(1), ids, ids)
    assert int((first == second).sum()) < 10
