"""`Key`: the published SplitMix64 sequence, and children that do not meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from typeguard import suppress_type_checks

from areno_fn import tree
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.key import Key, mix

MASK = (1 << 64) - 1


def unsigned(word: torch.Tensor) -> int:
    return int(word) & MASK


def splitmix(word: int) -> int:
    """The finaliser in plain integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def test_the_words_of_a_stream_are_the_published_splitmix64_sequence() -> None:
    """The first outputs of the reference implementation (Vigna, splitmix64.c) for seed 1234567."""
    key, words = Key.of(1234567), []
    for _ in range(5):
        words.append(unsigned(key.word()))
        key = key.advance()
    assert words == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("value", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
def test_the_finaliser_equals_integer_arithmetic(value: int) -> None:
    assert unsigned(mix(torch.tensor(value))) == splitmix(value & MASK)


def test_the_finaliser_is_a_bijection_on_a_sample() -> None:
    sample = torch.cat([torch.arange(-50_000, 50_000), torch.arange(100_000) << 40])
    distinct = len(set(sample.tolist()))
    assert len(set(mix(sample).tolist())) == distinct


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert tree.equal(Key.of(5), Key.of(5 + 2**64)) and tree.equal(Key.of(-1), Key.of(2**64 - 1))
    assert not tree.equal(Key.of(5), Key.of(6))


def test_frozen_values_of_folded_keys() -> None:
    """Resumed runs depend on these; they may never change."""
    assert int(Key.of(7).fold("rollout").fold(3).seed) == -1147672607342562011
    assert int(Key.of(7).fold("rollout").fold(3).counter) == 0


def test_integers_and_tensors_name_the_same_child() -> None:
    key = Key.of(3)
    assert tree.equal(key.fold(11), key.fold(torch.tensor(11)))


def test_names_and_numbers_name_different_children() -> None:
    key = Key.of(3)
    names = [key.fold(n) for n in ("a", "b", "ab", "", "rollout", "minibatches")]
    children = [*names, *key.split(1000), *key.fold("a").split(1000), *key.advance().split(1000), key, key.advance()]
    assert len({unsigned(child.word()) for child in children}) == len(children)


def test_folding_depends_on_the_place_in_the_stream() -> None:
    key = Key.of(3)
    assert not tree.equal(key.fold("a"), key.advance().fold("a"))
    assert not tree.equal(key.fold("a").fold("b"), key.fold("b").fold("a"))


def test_a_key_is_never_changed_by_use() -> None:
    key = Key.of(3)
    before = tree.map(torch.clone, key)
    key.fold(1), key.split(4), key.advance(), key.word()
    assert tree.equal(key, before)


def test_split_gives_as_many_as_asked() -> None:
    assert len(Key.of(0).split()) == 2 and len(Key.of(0).split(5)) == 5


def test_one_input_bit_changes_half_of_the_output_bits() -> None:
    """Avalanche of seed -> word of a child: 32 of 64 bits on average, and every output bit half of the time."""
    seeds = range(64)
    flips = []
    for seed in seeds:
        base = unsigned(Key.of(seed).fold(1).word())
        flips += [base ^ unsigned(Key.of(seed ^ (1 << bit)).fold(1).word()) for bit in range(64)]
    counts = [bin(flip).count("1") for flip in flips]
    assert abs(sum(counts) / len(counts) - 32) < 4 * 4 / len(counts) ** 0.5
    for bit in range(64):
        rate = sum(flip >> bit & 1 for flip in flips) / len(flips)
        assert abs(rate - 0.5) < 4 * 0.5 / len(flips) ** 0.5


def test_a_key_needs_whole_numbers() -> None:
    with pytest.raises(RecordError, match=r"Key\.seed"):
        Key(seed=3, counter=torch.tensor(0))  # type: ignore[arg-type]
    with pytest.raises(RecordError, match=r"Key\.counter must be an int64 scalar, received f32\[\]"):
        Key(seed=torch.tensor(0), counter=torch.tensor(0.0))
    with pytest.raises(RecordError, match=r"Key\.seed must be an int64 scalar, received i64\[2\]"):
        Key(seed=torch.zeros(2, dtype=torch.int64), counter=torch.tensor(0))


@pytest.mark.parametrize("number", [0, 3, -3, 2**63 - 1, -(2**63)])
def test_a_number_names_one_child_and_one_key_whatever_its_type(number: int) -> None:
    child, key = Key.of(1).fold(number), Key.of(number)
    same: list[Any] = [np.int64(number), torch.tensor(number)]
    same += [np.int8(number), torch.tensor(number, dtype=torch.int32)] if abs(number) < 100 else []
    same += [np.uint64(number), torch.tensor(number, dtype=torch.uint8)] if 0 <= number < 100 else []
    for value in same:
        assert torch.equal(Key.of(1).fold(value).seed, child.seed)
        assert torch.equal(Key.of(value).seed, key.seed)


@pytest.mark.parametrize("value", [1.0, None, b"a", np.float64(1), torch.tensor(1.0)])
def test_a_name_that_is_no_integer(value: Any) -> None:
    for name in (Key.of(1).fold, Key.of):
        with (
            suppress_type_checks(),
            pytest.raises(RecordError, match="a key is named by integers and strings, received"),
        ):
            name(value)
