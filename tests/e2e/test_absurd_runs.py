"""Numbers of a thousand million in every field of small runs: a dry run refuses them in words, or plans without filling memory."""

from __future__ import annotations

import resource
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from e2e import tiny, tiny_flow
from field_values import Place, changed, numbers
from msgspec import inspect

from areno_fn.contracts.errors import ArenoError
from areno_fn.contracts.spec import RunSpec
from areno_fn.engine.session import describe
from areno_fn.engine.specfile import check
from areno_fn.engine.specfile.types import plain_copy

ROOM = 4 << 30
RUNS = {"tokens": tiny.SPEC, "pictures": tiny_flow.SPEC}


@contextmanager
def little_memory() -> Iterator[None]:
    """Whatever asks for much more memory than there is now in use fails."""
    if torch.cuda.is_available():  # whose driver maps far more than it uses
        yield
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def spelled(name: str, out: Path) -> dict[str, Any]:
    found: dict[str, Any] = plain_copy(msgspec.convert(tomllib.loads(RUNS[name]), RunSpec))
    return found | {"out": str(out)}


def said(plain: dict[str, Any]) -> str:
    """What a dry run refuses; nothing where it would be run."""
    try:
        spec = msgspec.convert(plain, RunSpec)
    except msgspec.ValidationError as error:
        return str(error)
    try:
        describe(check(spec))
    except ArenoError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", RUNS)
def test_a_large_number_is_planned_or_refused_in_words(name: str, tmp_path: Path) -> None:
    plain = spelled(name, tmp_path / "out")
    with little_memory():
        assert said(plain) == ""
        found = [
            said(changed(plain, place, 10**9 if isinstance(info, inspect.IntType) else 1e18))
            for place, info in numbers(plain)
        ]
    assert "" in found and any(found)


def config_numbers(table: Any, at: Place = ()) -> Iterator[Place]:
    for key, value in table.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield (*at, key)


@pytest.mark.parametrize("value", [0, -1, 10**9, 10**18, 1e-300, 1e30])
@pytest.mark.parametrize("name", RUNS)
def test_a_model_beyond_all_memory_is_refused_by_its_configuration(name: str, value: Any, tmp_path: Path) -> None:
    plain = spelled(name, tmp_path / "out")
    with little_memory():
        for place in config_numbers(plain["model"]["config"]):
            told = said(changed(plain, ("model", "config", *place), value))
            allowed = place == ("max_position_embeddings",) and value == 10**9
            assert bool(told) != allowed, place


def test_what_is_too_large_is_said_with_the_limit(tmp_path: Path) -> None:
    plain = spelled("tokens", tmp_path / "out")
    endless = changed(changed(plain, ("phases", 0, "steps"), 0), ("phases", 0, "epochs"), 10**9)
    assert said(endless) == (
        "phases.sft.epochs: 1,000,000,000 epochs are 5,000,000,000 steps, and a phase has at most 1,000,000,000; lower it"
    )
    told = {
        ("model", "config", "vocab_size"): "vocab_size must be at most 16777216, received 1000000000",
        ("model", "config", "intermediate_size"): (
            "model: config: it makes 192,000,014,656 parameters, and a model from scratch has at most 100,000,000,000; lower the "
            "sizes in it"
        ),
        ("evaluation", "sampling", "top_k"): (
            "evaluation.sampling.top_k: the model has 259 tokens, of which the best 1000000000 are all; lower it, or use 0 for all"
        ),
    }
    plain = changed(plain, ("evaluation", "sampling", "temperature"), 1.0)
    for place, sentence in told.items():
        assert said(changed(plain, place, 10**9)).endswith(sentence)
    assert said(changed(plain, ("phases", 1, "algorithm", "sampling", "top_k"), 260)) == (
        "phases.grpo.algorithm.sampling.top_k: the model has 259 tokens, of which the best 260 are all; lower it, or use 0 for all"
    )
    assert said(changed(plain, ("phases", 1, "algorithm", "sampling", "top_k"), 259)) == ""
