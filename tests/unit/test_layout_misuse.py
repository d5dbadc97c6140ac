"""Wrong things given to layouts, placements and their laws are sentences, not errors from the middle of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from typeguard import suppress_type_checks

from areno_fn.contracts.errors import LayoutError
from areno_fn.contracts.layout import Iso, TensorSpec, concat, identity, pad, product, stack, transpose
from areno_fn.contracts.placement import place
from areno_fn.testing import laws

MATRIX = TensorSpec((4, 6))
PLAIN = identity({"a": MATRIX, "b": TensorSpec((3,))})
STATE = {"a": torch.ones(4, 6), "b": torch.ones(3)}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TensorSpec(3), "a shape is a sequence of sizes, received 3"),
        (lambda: concat({"a": MATRIX}, "t", 0.5), "there is no dimension 0.5 among 2"),
        (lambda: concat({"a": MATRIX}, "t", True), "there is no dimension True among 2"),
        (lambda: stack(["a"], "t", MATRIX, 1.0), "there is no dimension 1.0 among 3"),
        (lambda: pad("a", "t", MATRIX, 8, 0.5), "pad of 'a': there is no dimension 0.5 among 2"),
        (lambda: transpose("a", "t", MATRIX, (True, False)), r"\(True, False\) is not an order of the dimensions"),
        (lambda: PLAIN({"a": [1], "b": STATE["b"]}), r"'a' is a list, declared \[4, 6\]"),
        (lambda: place({"a": MATRIX}, {"a": 3}, 2), "'a' cannot be dealt by 3, which is no placement"),
    ],
)
def test_what_a_layout_cannot_be_made_of(make: Callable[[], Any], words: str) -> None:
    with suppress_type_checks(), pytest.raises(LayoutError, match=words):
        make()


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (lambda file: None, "the reference gives a NoneType, it should be leaves by their paths"),
        (lambda file: list(file.items()), "the reference gives a list"),
        (lambda file: {**file, "a": 3}, "the reference gives 'a' as a int, it should be a tensor on the CPU"),
        (lambda file: {**file, "a": file["a"].to("meta")}, "the reference gives 'a' as a tensor on meta"),
    ],
)
def test_a_reference_that_gives_no_leaves(reference: Any, words: str) -> None:
    with suppress_type_checks(), pytest.raises(AssertionError, match=words):
        laws.layout_agrees(PLAIN, reference)


@pytest.mark.parametrize(
    ("layout", "state", "words"),
    [
        (product([]), None, "there is no tensor that a file could hold"),
        (PLAIN, {}, "there is no tensor that a file could hold"),
        (PLAIN, STATE | {"a": 1}, "'a' is a int, it should be a tensor"),
        (PLAIN, STATE | {"a": STATE["a"].to("meta")}, r"'a' is float32 \[4, 6\] on meta, which no file is made of"),
        (PLAIN, STATE | {"a": STATE["a"].to(torch.complex64)}, r"'a' is complex64 \[4, 6\] on cpu"),
    ],
)
def test_a_file_that_cannot_be(layout: Iso, state: Any, words: str) -> None:
    with suppress_type_checks(), pytest.raises(AssertionError, match=words):
        laws.checkpoint_roundtrip(layout, state=state)


def test_patterns_are_not_the_characters_of_a_text() -> None:
    with pytest.raises(AssertionError, match=r"a collection of patterns, such as \('vision\.\*',\), received a text"):
        laws.checkpoint_roundtrip(PLAIN, left_out="vision.*")
