"""Hypothesis strategies for numbers per decision, and for batches that carry them beside their documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

from areno_fn import random
from areno_fn.contracts.actions import Actions, Comparisons, Estimates, Scores
from areno_fn.contracts.batch import Experience, PackedTokens, Pairs
from areno_fn.contracts.key import Key
from areno_fn.testing.document_strategies import documents, packed

Draw = Callable[..., Any]


def scores(*, max_documents: int = 4, max_decisions: int = 5) -> st.SearchStrategy[Scores]:
    """Log-probabilities of decisions in documents, of which some count and some may not."""
    return _drawn(max_documents, max_decisions).map(lambda d: Scores(**d.scored(), documents=d.documents))


@st.composite
def actions(draw: Draw, *, max_documents: int = 4, max_decisions: int = 5) -> Actions:
    """Decisions of a policy that has moved a little, with and without a reference and what was recorded while sampling."""
    d = draw(_drawn(max_documents, max_decisions))
    return Actions(**d.scored(), **_recorded(draw, d), documents=d.documents)


@st.composite
def comparisons(draw: Draw, *, max_pairs: int = 3, max_decisions: int = 5) -> Comparisons:
    """Pairs of documents beside what a reference says of their decisions."""
    d = draw(_drawn(2 * max_pairs, max_decisions, even=True))
    return Comparisons(**d.scored(), reference=d.near("reference"), documents=d.documents)


@st.composite
def estimates(draw: Draw, *, max_documents: int = 4, max_decisions: int = 5) -> Estimates:
    """Values of a critic near what they were before, and returns."""
    d = draw(_drawn(max_documents, max_decisions))
    return Estimates(
        value=d.logp,
        old=d.near("old"),
        returns=d.normal("returns"),
        weight=d.weight,
        segments=d.segments,
        documents=d.documents,
    )


@st.composite
def experiences(draw: Draw, *, vocabulary: int = 32, max_documents: int = 5, max_length: int = 12) -> Experience:
    """Packed documents beside what a policy-gradient update needs to know of their decisions."""
    rows = draw(documents(vocabulary=vocabulary, max_documents=max_documents, max_length=max_length))
    made = packed(rows)
    d = _of(draw, made)
    valued = {"values": d.near("values"), "returns": d.normal("returns")} if draw(st.booleans()) else {}
    return Experience(packed=made, **_recorded(draw, d), **valued)


@st.composite
def pairs(draw: Draw, *, vocabulary: int = 32, max_pairs: int = 3, max_length: int = 12) -> Pairs:
    """Packed pairs of documents beside what a reference says of their decisions."""
    count = draw(st.integers(1, max_pairs))
    one = documents(vocabulary=vocabulary, max_documents=1, max_length=max_length)
    made = packed([row for _ in range(2 * count) for row in draw(one)])
    return Pairs(packed=made, reference=_of(draw, made).near("reference"))


_KEYS = st.integers(0, 2**32).map(Key.of)


@attrs.frozen(kw_only=True)
class _Drawn:
    """Decisions by document; every number of theirs is a function of the key and a name."""

    key: Key
    weight: torch.Tensor
    segments: torch.Tensor
    documents: int

    def normal(self, name: str) -> torch.Tensor:
        return random.normal(self.key.fold(name), torch.arange(self.weight.shape[0]))

    @property
    def logp(self) -> torch.Tensor:
        return -self.normal("logp").abs()

    def near(self, name: str) -> torch.Tensor:
        """Numbers that differ from the log-probabilities as those of other parameters do."""
        return self.logp + 0.3 * self.normal(name)

    def scored(self) -> dict[str, torch.Tensor]:
        entropy = self.normal("entropy").abs()
        return {"logp": self.logp, "weight": self.weight, "segments": self.segments, "entropy": entropy}


def _of(draw: Draw, made: PackedTokens) -> _Drawn:
    """The decisions of packed documents."""
    segments = made.segments[made.index]
    return _Drawn(key=draw(_KEYS), weight=made.weight, segments=segments, documents=made.documents)


def _recorded(draw: Draw, d: _Drawn) -> dict[str, Any]:
    """What `Actions` and `Experience` know beside the scores."""
    return {
        "old": d.near("old"),
        "advantage": d.normal("advantage"),
        "reference": d.near("reference") if draw(st.booleans()) else None,
        "rollout": d.near("rollout") if draw(st.booleans()) else None,
    }


@st.composite
def _drawn(draw: Draw, max_documents: int, max_decisions: int, *, even: bool = False) -> _Drawn:
    step = 2 if even else 1
    count = step * draw(st.integers(1, max_documents // step))
    sizes = draw(st.lists(st.integers(1, max_decisions), min_size=count, max_size=count))
    total = sum(sizes)
    weights = st.lists(st.sampled_from((0.0, 1.0)), min_size=total, max_size=total).filter(any)
    return _Drawn(
        key=draw(_KEYS),
        weight=torch.tensor(draw(weights)),
        segments=torch.arange(count).repeat_interleave(torch.tensor(sizes)),
        documents=count,
    )
