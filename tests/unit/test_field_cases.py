"""Every field case of losses, data, rollouts and optimizers has a test that carries its number, those of flow models too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS = {
    "loss": "L1 L3 L5 L6 L7 L9 L10 L11 L12 L14 L15 L17 L18 L19 L20 L21 L22",
    "data": "D1 D2 D3 D6 D8 D9 D10 D13",
    "rollout": "R1 R2 R3 R5 R7 R8 R9",
    "optimizer": "O1 O2 O4 O5 O6 O7 O9 O11 O12 O13",
}
NAME = re.compile(r"^def test_((?:[A-Z]\d+_)+)", flags=re.MULTILINE)


@pytest.fixture(scope="module")
def numbers() -> set[str]:
    found = (NAME.findall(path.read_text(encoding="utf-8")) for path in TESTS.rglob("test_*.py"))
    return {number for names in found for name in names for number in name.rstrip("_").split("_")}


@pytest.mark.parametrize("section", ROWS)
def test_every_row_has_a_test_that_carries_its_number(section: str, numbers: set[str]) -> None:
    assert set(ROWS[section].split()) <= numbers
