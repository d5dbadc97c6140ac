"""Values, names and paths that a hostile header or index might hold, drawn from a generator."""

from __future__ import annotations

from random import Random
from typing import Any

from faults.checkpoint_folders import OUTSIDE

NUMBERS = (
    0, 1, -1, 2, 7, 24, 2**31, 2**32 + 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**300, True, False, 1.0, -0.0, 1e400,
    float("nan"), float("inf"), None, "4", [], {},
)  # fmt: skip
SHAPES = (
    [], [0], [2**32, 2**32], [2**62, 0, 2**62], [1] * 65, [0, *[2**62] * 63], [4.0, 7], "47", None, [[4], 7], {"0": 4},
    [True, 7], [10**30], [-4, -7], [7, 4], [4, 7], [28],
)  # fmt: skip
DTYPES = ("F64", "F16", "BF16", "I64", "BOOL", "U8", "C64", "F8_E4M3", "f32", "", "F4", None, 4, ["F32"])
NAMES = (
    "", "\0", "\ud83d", "__metadata__", "a" * 5000, "model.layers.0", "../x", "\n", "norm.weight ", "größe", "__proto__",
)  # fmt: skip
FILE_NAMES = (
    "no.safetensors", f"../{OUTSIDE}", "/etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", "..", ".", "", "/",
    "\ud800.safetensors", "a" * 300 + ".safetensors", "x/" * 3000 + "a.safetensors", "~/x.safetensors",
    "C:\\x.safetensors", f"..\\{OUTSIDE}", f"%2e%2e/{OUTSIDE}", "link.safetensors", "a\nb.safetensors",
    "model\u202e.safetensors", "file:///etc/passwd",
)  # fmt: skip
METADATA = (
    {}, {"format": "pt"}, {"a": 1}, {"a": None}, [], None, "pt", {"\ud800": "a"}, {"a": {"b": "c"}}, {"total_size": 2**70},
)  # fmt: skip


def number(random: Random) -> Any:
    return random.choice([*NUMBERS, random.randrange(200)])


def shape(random: Random) -> Any:
    return random.choice([*SHAPES, [number(random)], [number(random), number(random)]])


def value(random: Random) -> Any:
    nested: Any = []
    for _ in range(random.choice((1, 5, 300))):
        nested = [nested]
    return random.choice([number(random), shape(random), "\ud800", "\0", "a" * 70_000, "\n", nested])


def metadata(random: Random) -> Any:
    return random.choice([*METADATA, {"a": value(random)}, {"total_size": number(random)}])


def name(random: Random, names: list[str]) -> str:
    return random.choice([*names, *NAMES])


def file_name(random: Random, own: list[str]) -> str:
    first = random.choice(own)
    turned = (first.upper(), f"./{first}", f"{first}/", f" {first}", f"{first} ", f"{first}\0", f"x/../{first}")
    return random.choice([*own, *turned, f"../model/{first}", *FILE_NAMES])
