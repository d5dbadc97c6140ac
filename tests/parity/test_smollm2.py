"""SmolLM2-135M-Instruct against transformers, on its own parameters read from a real folder.

The training runs take minutes and are made by hand: `python tests/parity/smollm2.py FOLDER`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from parity import smollm2

from areno_fn import Sampling

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Path:
    given = pytestconfig.getoption("--smollm2")
    if given is None:
        pytest.skip("needs a real model: run `python tests/smollm2.py FOLDER` once, then give pytest --smollm2 FOLDER")
    assert Path(given, "config.json").is_file(), (
        f"{given} holds no model; make it with `python tests/smollm2.py {given}`"
    )
    return Path(given).resolve()


@pytest.fixture(scope="module")
def one(folder: Path) -> smollm2.Subject:
    return smollm2.subject(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return smollm2.reference(folder)


def require(findings: Iterable[smollm2.Finding], count: int) -> None:
    """All of them hold, and none was left out."""
    found = list(findings)
    assert len(found) == count
    broken = [str(finding) for finding in found if not finding.holds]
    assert not broken, "\n".join(broken)


def test_logits_of_packed_documents_equal_transformers(one: smollm2.Subject, theirs: Any) -> None:
    require(smollm2.logits(one, theirs), 1)


def test_greedy_answers_equal_transformers(one: smollm2.Subject, theirs: Any) -> None:
    require(smollm2.greedy(one, theirs), 5)


@pytest.mark.parametrize("sampling", smollm2.SAMPLINGS)
def test_recorded_log_probabilities_are_those_of_training(one: smollm2.Subject, sampling: Sampling) -> None:
    require(smollm2.recorded(one, sampling, samples=2), 4)


def test_loaded_and_saved_the_folder_is_the_same_to_the_bit(one: smollm2.Subject, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as scratch:  # pytest would keep gigabytes of folders
        require(smollm2.round_trips(one, Path(scratch)), 5)
