from __future__ import annotations

import hashlib
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areno_fn.contracts.errors import DataError
from areno_fn.contracts.spec import ArithmeticData
from areno_fn.world.arithmetic import held_out, rows


def pairs(spec: ArithmeticData) -> list[tuple[int, int]]:
    return [tuple(map(int, row["prompt"].rstrip("=").split("+"))) for row in rows(spec)]


def reference_held_out(a: int, b: int) -> bool:
    digest = hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).hexdigest()
    return int(digest[:16], 16) % 10 == 0


def test_rows_are_sums() -> None:
    for row in rows(ArithmeticData(count=300)):
        a, b = row["prompt"].removesuffix("=").split("+")
        assert 10 <= int(a) <= 99
        assert 10 <= int(b) <= 99
        assert row["response"] == row["answer"] == str(int(a) + int(b))
        assert row["prompt"] == f"{int(a)}+{int(b)}="


def test_the_split_is_known_by_value() -> None:
    # printf 12+12 | sha256sum begins 5b8122b6c1985c8e, which is 6593589497774496910: held out
    assert held_out(12, 12)
    # printf 12+34 | sha256sum begins 157f7928a7126044, which ends in 8
    assert not held_out(12, 34)
    assert not held_out(34, 12)
    everything = list(product(range(100), repeat=2))
    assert [pair for pair in everything if held_out(*pair)] == [
        pair for pair in everything if reference_held_out(*pair)
    ]
    share = sum(held_out(*pair) for pair in everything) / len(everything)
    assert 0.08 < share < 0.12


@given(digits=st.integers(1, 6), seeds=st.tuples(st.integers(-5, 5), st.integers(-5, 5)), count=st.integers(1, 8))
def test_train_and_held_out_never_meet_whatever_the_seeds(digits: int, seeds: tuple[int, int], count: int) -> None:
    train = pairs(ArithmeticData(digits=digits, count=count, split="train", seed=seeds[0]))
    held = pairs(ArithmeticData(digits=digits, count=count, split="heldout", seed=seeds[1]))
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in held}
    assert all(reference_held_out(*pair) for pair in held)
    assert not any(reference_held_out(*pair) for pair in train)


@pytest.mark.parametrize("digits", [1, 2])
def test_the_two_splits_together_are_every_pair_once(digits: int) -> None:
    everything = set(product(range(10) if digits == 1 else range(10, 100), repeat=2))
    held = sum(reference_held_out(*pair) for pair in everything)
    drawn = pairs(ArithmeticData(digits=digits, count=held, split="heldout"))
    drawn += pairs(ArithmeticData(digits=digits, count=len(everything) - held, split="train"))
    assert len(drawn) == len(everything)
    assert set(drawn) == everything


def test_more_rows_than_pairs_are_refused_with_the_number_there_is() -> None:
    held = sum(reference_held_out(*pair) for pair in product(range(10), repeat=2))
    with pytest.raises(DataError, match=f"has {held} different sums, but count asks for {held + 1}"):
        rows(ArithmeticData(digits=1, count=held + 1, split="heldout"))


def test_rows_are_a_function_of_the_specification() -> None:
    spec = ArithmeticData(count=50, seed=3)
    assert rows(spec) == rows(spec)
    assert rows(ArithmeticData(count=20, seed=3)) == rows(spec)[:20]
    assert rows(ArithmeticData(count=50, seed=4)) != rows(spec)


def test_numbers_are_uniform() -> None:
    numbers = [n for pair in pairs(ArithmeticData(digits=3, count=4000)) for n in pair]
    # mean of 8000 uniforms on 100..999: 549.5, standard error 259.8 / sqrt(8000) = 2.9
    assert abs(sum(numbers) / len(numbers) - 549.5) < 15
    counts = [sum(n // 100 == leading for n in numbers) for leading in range(1, 10)]
    # each Binomial(8000, 1/9): mean 889, deviation 28.1
    assert all(abs(count - 8000 / 9) < 5 * 28.1 for count in counts)
