"""`Key`: randomness as a value.

A key names a stream of random words. It is split and folded, never advanced behind the caller's back, and
it is an ordinary record of tensors, so that a checkpoint stores it like any other state. The mixing
function is the SplitMix64 finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014): a bijection of 64-bit words that is cheap in any backend.
"""

from __future__ import annotations

import hashlib
import operator
from typing import Any, SupportsIndex

import torch

from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.record import record, shown

GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, odd, as a signed 64-bit word
_MUL_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MUL_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


@record
class Key:
    """A random stream: `seed` chooses it, `counter` is the place in it.

    Attributes:
        seed: int64 [], any value.
        counter: int64 [], how often `advance` was called.
    """

    seed: torch.Tensor
    counter: torch.Tensor

    def __check__(self) -> None:
        for name in ("seed", "counter"):
            value = getattr(self, name)
            if value.dtype != torch.int64 or value.ndim:
                raise RecordError(f"Key.{name} must be an int64 scalar, received {shown(value)}")

    @staticmethod
    def of(seed: SupportsIndex) -> Key:
        """The key of an integer seed (taken modulo 2^64).

        Raises:
            RecordError: the seed is not an integer.
        """
        return Key(seed=torch.tensor(_signed(seed)), counter=torch.tensor(0))

    def word(self) -> torch.Tensor:
        """The 64-bit word of this key, int64 []."""
        return mix(self.seed + (self.counter + 1) * GOLDEN)

    def fold(self, data: SupportsIndex | str | torch.Tensor) -> Key:
        """The child key named by an integer, a scalar tensor of integers or a string; equal numbers name one child.

        Raises:
            RecordError: the name is something else.
        """
        name = _named(data) if isinstance(data, str) else data
        seed = mix(mix(self.word() ^ GOLDEN) + (_scalar(name) + 1) * GOLDEN)
        return Key(seed=seed, counter=torch.zeros_like(self.counter))

    def split(self, count: int = 2) -> tuple[Key, ...]:
        """`count` independent children; the parent must not be used for draws afterwards."""
        return tuple(self.fold(i) for i in range(count))

    def advance(self) -> Key:
        """The next key of the same stream."""
        return Key(seed=self.seed, counter=self.counter + 1)


def mix(word: torch.Tensor) -> torch.Tensor:
    """The SplitMix64 finaliser on int64 words, elementwise, any shape."""
    word = (word ^ _shift(word, 30)) * _MUL_1
    word = (word ^ _shift(word, 27)) * _MUL_2
    return word ^ _shift(word, 31)


def _shift(word: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift; torch's own is arithmetic on int64."""
    return (word >> by) & ((1 << (64 - by)) - 1)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _named(text: str) -> int:
    """The 64-bit word that a string stands for: the first eight bytes of its SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "little", signed=True)


def _signed(value: SupportsIndex) -> int:
    # a trace knows its integers as constants, and not what type they had
    integer: Any = value if torch.compiler.is_compiling() else _integer(value)
    word: int = integer & ((1 << 64) - 1)
    return word - (1 << 64) if word >> 63 else word


def _integer(value: Any) -> int:
    """Integers of other libraries and booleans as Python's own, which do not overflow."""
    try:
        return operator.index(value)
    except TypeError:
        raise RecordError(
            f"a key is named by integers and strings, received the {type(value).__name__} {value!r}"
        ) from None


def _scalar(data: SupportsIndex | torch.Tensor) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        return torch.tensor(_signed(data))
    if data.is_floating_point() or data.is_complex():
        raise RecordError(f"a key is named by integers and strings, received the tensor {shown(data)}")
    return data.to(torch.int64)
