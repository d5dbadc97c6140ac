"""Planted mistakes: every law passes on the library, on a second implementation, and on none of its mutants."""

from __future__ import annotations

import pytest
from faults import batch_cases, law_cases, loss_cases, optimizer_cases, step_cases, variant_cases
from faults.case import Case

PARTS = (
    step_cases.CASES,
    loss_cases.CASES,
    batch_cases.CASES,
    optimizer_cases.CASES,
    law_cases.CASES,
    variant_cases.CASES,
)
CASES: dict[str, Case] = {name: case for part in PARTS for name, case in part.items()}
MUTANTS = [(name, fault) for name, (_, _, _, faults) in CASES.items() for fault in faults]


def test_no_case_hides_another() -> None:
    assert len(CASES) == sum(map(len, PARTS))


@pytest.mark.parametrize("name", CASES)
def test_the_library_keeps_the_law(name: str) -> None:
    law, library, _, _ = CASES[name]
    law(library)


@pytest.mark.parametrize("name", CASES)
def test_a_second_implementation_keeps_the_law(name: str) -> None:
    law, _, build, _ = CASES[name]
    law(build(None))


@pytest.mark.parametrize(("name", "fault"), MUTANTS, ids=[f"{name}-{fault}" for name, fault in MUTANTS])
def test_the_law_kills_the_mutant(name: str, fault: str) -> None:
    law, _, build, _ = CASES[name]
    with pytest.raises(AssertionError):
        law(build(fault))
