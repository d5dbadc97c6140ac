"""Draws: frozen values, an oracle in plain integers, and statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import pytest
import torch

from areno_fn import random
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.key import Key

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
KEY = Key.of(7).fold("rollout").fold(3)
IDS = torch.tensor([0, 1, 2**40])
POSITIONS = torch.tensor([[0], [5]])
N = 100_000
MANY = torch.arange(N)


def splitmix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def word_of(seed: int, counter: int, *coordinates: int) -> int:
    """What `random.words` computes, in plain integers."""
    word = splitmix((seed + (counter + 1) * GOLDEN) & MASK)
    for coordinate in coordinates:
        word = splitmix((word + (coordinate + 1) * GOLDEN) & MASK)
    return splitmix(word ^ GOLDEN)


def test_frozen_words() -> None:
    """Resumed and replayed runs depend on these; they may never change."""
    assert random.words(KEY, IDS, POSITIONS).tolist() == [
        [489391963430191439, -4519635205555710554, -6291490883412933514],
        [3360470360040818555, -451205541494482081, 2424639066291615169],
    ]


def test_words_equal_integer_arithmetic() -> None:
    seed = int(KEY.seed)
    for coordinates in [(), (0,), (5, 2**40), (3, 2, 1), (-1, -(2**62))]:
        received = int(random.words(KEY, *(torch.tensor(c) for c in coordinates))) & MASK
        assert received == word_of(seed, 0, *coordinates)


def test_uniform_is_the_top_bits_of_the_word() -> None:
    words = [int(w) & MASK for w in random.words(KEY, MANY[:100])]
    single, double = random.uniform(KEY, MANY[:100]), random.uniform(KEY, MANY[:100], dtype=torch.float64)
    assert single.dtype == torch.float32 and double.dtype == torch.float64
    assert double.tolist() == [((w >> 12) + 0.5) / 2**52 for w in words]
    assert single.tolist() == [((w >> 41) + 0.5) / 2**23 for w in words]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_is_strictly_inside_the_unit_interval_in_every_dtype(dtype: torch.dtype) -> None:
    extremes = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    numbers = random._unit(extremes, dtype).double()
    assert bool(((numbers > 0) & (numbers < 1)).all()) and len(set(numbers.tolist())) == 4


def test_normal_is_the_inverse_distribution_function_of_the_uniform() -> None:
    unit = random.uniform(KEY, MANY[:200], dtype=torch.float64)
    expected = [NormalDist().inv_cdf(u) for u in unit.tolist()]
    received = random.normal(KEY, MANY[:200], dtype=torch.float64)
    torch.testing.assert_close(received, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    assert random.normal(KEY, MANY[:2]).dtype == torch.float32


def test_gumbel_is_minus_log_minus_log_of_the_uniform() -> None:
    unit = random.uniform(KEY, MANY[:200], dtype=torch.float64)
    expected = [-math.log(-math.log(u)) for u in unit.tolist()]
    received = random.gumbel(KEY, MANY[:200], dtype=torch.float64)
    torch.testing.assert_close(received, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_extreme_draws_are_finite() -> None:
    extremes = random._unit(torch.tensor([0, -1]), torch.float64)
    assert bool(torch.isfinite(torch.special.ndtri(extremes)).all())
    assert bool(torch.isfinite(-torch.log(-torch.log(extremes))).all())


def ks_distance(sample: torch.Tensor, distribution: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """sqrt(n) times the largest distance between the sample's and the true distribution function."""
    ordered = distribution(sample.double().sort().values)
    steps = torch.arange(len(ordered) + 1, dtype=torch.float64) / len(ordered)
    return (
        float(torch.maximum((ordered - steps[:-1]).abs().max(), (steps[1:] - ordered).abs().max()))
        * len(ordered) ** 0.5
    )


CRITICAL = 1.95  # Kolmogorov's limit distribution exceeds this with probability 0.001


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_distributions_by_kolmogorov_smirnov(seed: int) -> None:
    key = Key.of(seed)
    assert ks_distance(random.uniform(key, MANY), lambda x: x) < CRITICAL
    assert ks_distance(random.normal(key, MANY), torch.special.ndtr) < CRITICAL
    assert ks_distance(random.gumbel(key, MANY), lambda x: torch.exp(-torch.exp(-x))) < CRITICAL


def test_the_distance_sees_a_wrong_distribution() -> None:
    assert ks_distance(random.uniform(Key.of(0), MANY) * 0.98, lambda x: x) > CRITICAL


def test_moments_of_the_normal() -> None:
    x = random.normal(Key.of(5), MANY, dtype=torch.float64)
    limit = 4 / N**0.5
    assert abs(float(x.mean())) < limit
    assert abs(float((x**2).mean()) - 1) < limit * 2**0.5
    assert abs(float((x**3).mean())) < limit * 15**0.5
    assert abs(float((x**4).mean()) - 3) < limit * 96**0.5


def test_the_gumbel_maximum_draws_from_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03], dtype=torch.float64)
    noise = random.gumbel(Key.of(9), MANY[:, None], torch.tensor(4), torch.arange(5), dtype=torch.float64)
    counts = torch.bincount((probabilities.log() + noise).argmax(1), minlength=5).double()
    chi_square = ((counts - N * probabilities) ** 2 / (N * probabilities)).sum()
    assert float(chi_square) < 18.5  # 4 degrees of freedom, probability 0.001


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def test_neighbours_are_uncorrelated() -> None:
    key, position = Key.of(11), torch.tensor(3)
    base = random.uniform(key, MANY, position)
    neighbours = {
        "id": random.uniform(key, MANY + 1, position),
        "position": random.uniform(key, MANY, position + 1),
        "swapped": random.uniform(key, position, MANY),
        "fewer coordinates": random.uniform(key, MANY),
        "more coordinates": random.uniform(key, MANY, position, torch.tensor(0)),
        "seed": random.uniform(Key.of(12), MANY, position),
        "counter": random.uniform(key.advance(), MANY, position),
        "child": random.uniform(key.fold(0), MANY, position),
        "sibling": random.uniform(key.fold(1), MANY, position),
    }
    names, rows = list(neighbours), [base, *neighbours.values()]
    table = torch.corrcoef(torch.stack([row.double() for row in rows]))
    for i in range(len(rows)):
        for j in range(i):
            assert abs(float(table[i, j])) < 4.5 / N**0.5, (i and names[i - 1], j and names[j - 1])


def test_neighbours_along_a_row_are_uncorrelated() -> None:
    numbers = random.uniform(Key.of(13), MANY)
    for lag in (1, 2, 3, 64):
        assert abs(correlation(numbers[:-lag], numbers[lag:])) < 4 / N**0.5


def test_a_grid_of_coordinates_never_repeats_a_word() -> None:
    grid = random.words(Key.of(1), torch.arange(400)[:, None], torch.arange(400))
    assert len(set(grid.flatten().tolist())) == 400 * 400


def test_draws_do_not_meet_the_words_of_children() -> None:
    key = Key.of(1)
    draws = set(random.words(key, torch.arange(2000)).tolist())
    children = {int(key.fold(i).word()) for i in range(2000)} | {int(key.fold(i).seed) for i in range(2000)}
    assert not draws & children


def test_one_bit_of_a_coordinate_changes_half_of_the_word() -> None:
    key, ids = Key.of(2), torch.arange(500)[:, None]
    flips = random.words(key, ids) ^ random.words(key, ids ^ (torch.tensor(1) << torch.arange(64)))
    bits = (flips[..., None] >> torch.arange(64)) & 1
    assert abs(float(bits.sum(-1).double().mean()) - 32) < 4 * 4 / (500 * 64) ** 0.5
    rates = bits.double().mean(0)
    assert float((rates - 0.5).abs().max()) < 5 * 0.5 / 500**0.5


def test_permutation_is_one_and_is_frozen() -> None:
    assert random.permutation(KEY, 8).tolist() == [0, 6, 3, 5, 7, 4, 1, 2]
    assert random.permutation(KEY, 1000).sort().values.tolist() == list(range(1000))
    assert random.permutation(KEY, 0).tolist() == []


def test_permutations_are_uniform() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for i in range(4800):
        order = tuple(random.permutation(Key.of(i), 4).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((c - 200) ** 2 / 200 for c in counts.values()) < 49.8  # 23 degrees of freedom, probability 0.001


def test_coordinates_are_integers() -> None:
    """1.5 and 1.7 would otherwise draw alike."""
    with pytest.raises(RecordError, match=r"coordinates of draws are tensors of integers, received f32\[2\]"):
        random.uniform(KEY, torch.tensor([1.5, 1.7]))


@pytest.mark.traced
def test_keys_are_folded_and_drawn_from_inside_a_compiled_region() -> None:
    def draw(key: Key, step: torch.Tensor) -> torch.Tensor:
        return random.uniform(key.fold(3).fold("rollout").fold(step), IDS)

    compiled = torch.compile(draw, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(KEY, torch.tensor(5)), draw(KEY, torch.tensor(5)))
