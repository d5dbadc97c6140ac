"""Checkpoints mutated at random: refused with a sentence, or loaded bit for bit, without a look outside the folder.

`python tests/faults/fuzz_checkpoints.py` runs ten thousand of them and measures memory.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from faults.checkpoint_folders import whole, write
from faults.checkpoint_judge import judged
from faults.checkpoint_mutations import mutate
from hypothesis import given, settings

from areno_fn.ckpt import header, jsontext, store
from areno_fn.contracts.errors import ArenoError


def run(seed: int, shards: int, damaged: bool = True) -> str:
    folder, done = mutate(random.Random(seed), whole(shards)) if damaged else (whole(shards), "nothing")
    with tempfile.TemporaryDirectory() as root:
        try:
            return judged(write(Path(root), folder))
        except AssertionError as error:
            raise AssertionError(f"{error}, after {done}") from error


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.sampled_from((1, 3)))
def test_mutated_checkpoints(seed: int, shards: int) -> None:
    run(seed, shards)


@pytest.mark.parametrize("shards", [1, 3])
def test_whole_checkpoints_are_accepted(shards: int) -> None:
    assert run(0, shards, damaged=False) == "accepted"


def test_the_judge_sees_a_read_outside_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of links, a file outside is read, and the judge says so."""
    from faults.checkpoint_folders import OUTSIDE, Special

    from areno_fn.ckpt import store
    from areno_fn.ckpt.store import SINGLE

    folder = write(tmp_path, {**whole(1), SINGLE: Special("link", f"../{OUTSIDE}")})
    assert judged(folder) == "CheckpointError"
    monkeypatch.setattr(store, "member", lambda folder, name: folder / name)
    with pytest.raises(AssertionError, match=OUTSIDE):
        judged(folder)


def test_the_judge_sees_a_tensor_that_is_not_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from areno_fn.ckpt import stream

    real = stream.memory
    monkeypatch.setattr(stream, "memory", lambda tensor: real(tensor)[:-1])
    with pytest.raises(AssertionError, match="not what is in the files"):
        judged(write(tmp_path, whole(1)))


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "gaps, overlaps and lengths are not looked at": (header, "_require_exact_cover", lambda *_: None),
    "the index is a hint": (store, "_index_problems", lambda *_: []),
    "a name may stand twice": (jsontext, "_unique", dict),
    "links and dots are followed": (store, "member", lambda folder, name: folder / name),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_library_that_forgets_a_check_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutations reach the check, and the judge sees what comes of its absence."""
    monkeypatch.setattr(*PLANTED[fault])
    with pytest.raises(Exception, match=r".") as caught:
        for seed in range(3000):
            run(seed, 1 + 2 * (seed % 2))
    assert not isinstance(caught.value, ArenoError)
