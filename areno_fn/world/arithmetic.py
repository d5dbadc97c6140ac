"""Sums `a+b=`: a task that is learnt from nothing, generated with train and held-out rows that never meet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from areno_fn import random
from areno_fn.contracts.errors import DataError
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import ArithmeticData
from areno_fn.world.data_row import Row

HELD_OUT = 10
"""One pair in so many is held out."""

_ROUNDS = 6
_CHUNK = 4096


def rows(spec: ArithmeticData) -> list[Row]:
    """`count` different sums, a function of the specification alone: `{"prompt": "12+34=", "response": "46", "answer": "46"}`.

    Both numbers are uniform over those of exactly `digits` digits (0 to 9 for one), without repetition. Which side
    of the split a pair is on depends on its two numbers, neither on their order nor on the seed.

    Raises:
        DataError: the split has fewer pairs than `count`.
    """
    name = f"arithmetic({spec.digits} digits, {spec.split}, seed {spec.seed})"
    found: list[Row] = []
    heldout = spec.split == "heldout"
    for a, b in _pairs(spec):
        if held_out(a, b) == heldout:
            answer = str(a + b)
            found.append(Row({"prompt": f"{a}+{b}=", "response": answer, "answer": answer}, name, len(found) + 1))
            if len(found) == spec.count:
                return found
    raise DataError(
        f"{name} has {len(found)} different sums, but count asks for {spec.count}; lower count or raise digits"
    )


def held_out(a: int, b: int) -> bool:
    """Whether `a + b`, and so `b + a`, is held out: the SHA-256 of the pair, smaller number first, modulo 10 is 0."""
    pair = f"{a}+{b}" if a < b else f"{b}+{a}"
    return int.from_bytes(hashlib.sha256(pair.encode()).digest()[:8], "big") % HELD_OUT == 0


def _pairs(spec: ArithmeticData) -> Iterator[tuple[int, int]]:
    """Every pair once, in a random order."""
    least = _least(spec.digits)
    size = 10**spec.digits - least
    key = Key.of(spec.seed).fold("arithmetic").fold(spec.split)
    for start in range(0, size**2, _CHUNK):
        index = torch.arange(start, min(start + _CHUNK, size**2))
        left, right = _shuffle(key, index // size, index % size, size)
        yield from zip((left + least).tolist(), (right + least).tolist(), strict=True)


def _least(digits: int) -> int:
    """The smallest number of so many digits."""
    return 0 if digits == 1 else 10 ** (digits - 1)


def _shuffle(key: Key, left: torch.Tensor, right: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A Feistel network on pairs of residues, int64 [n] each: every round is a bijection, and so is the whole."""
    for step in range(_ROUNDS):
        left, right = right, (left + random.words(key.fold(step), right) % size) % size
    return left, right
