"""Hypothesis strategies for packed documents."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from areno_fn.contracts.batch import PackedTokens

Draw = Callable[..., Any]


@st.composite
def documents(
    draw: Draw, *, vocabulary: int = 32, max_documents: int = 5, max_length: int = 12
) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Documents of at least two tokens, each with one weight per token but the first, not all of them 0."""
    made = []
    for _ in range(draw(st.integers(1, max_documents))):
        length = draw(st.integers(2, max_length))
        tokens = draw(st.lists(st.integers(0, vocabulary - 1), min_size=length, max_size=length))
        weights = draw(st.lists(st.sampled_from((0.0, 1.0)), min_size=length - 1, max_size=length - 1).filter(any))
        made.append((tuple(tokens), tuple(weights)))
    return made


def packed(rows: list[tuple[tuple[int, ...], tuple[float, ...]]]) -> PackedTokens:
    """Lays documents, as `documents` draws them, end to end; every token but a document's first is a decision."""
    starts = list(itertools.accumulate((len(row) for row, _ in rows), initial=0))
    return PackedTokens(
        tokens=torch.tensor([token for row, _ in rows for token in row]),
        positions=torch.tensor([place for row, _ in rows for place in range(len(row))]),
        segments=torch.tensor([number for number, (row, _) in enumerate(rows) for _ in row]),
        index=torch.tensor([starts[n] + place for n, (row, _) in enumerate(rows) for place in range(len(row) - 1)]),
        targets=torch.tensor([token for row, _ in rows for token in row[1:]]),
        weight=torch.tensor([weight for _, weights in rows for weight in weights]),
        documents=len(rows),
        longest=max(len(row) for row, _ in rows),
    )


def packed_tokens(
    *, vocabulary: int = 32, max_documents: int = 5, max_length: int = 12
) -> st.SearchStrategy[PackedTokens]:
    """Packed documents of unequal lengths with a random set of trained tokens."""
    return documents(vocabulary=vocabulary, max_documents=max_documents, max_length=max_length).map(packed)


@st.composite
def split_batches(
    draw: Draw, *, vocabulary: int = 32, max_documents: int = 5, max_length: int = 12
) -> tuple[PackedTokens, list[PackedTokens]]:
    """A packed batch and the same documents packed into one or more parts, for `laws.exact_under_split`."""
    rows = draw(documents(vocabulary=vocabulary, max_documents=max_documents, max_length=max_length))
    cuts = draw(st.sets(st.integers(1, len(rows) - 1))) if len(rows) > 1 else set()
    edges = [0, *sorted(cuts), len(rows)]
    return packed(rows), [packed(rows[a:b]) for a, b in itertools.pairwise(edges)]
