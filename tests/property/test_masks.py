"""Every objective of the library, on drawn decisions: what has weight 0 is never read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areno_fn.steps.joins import Stage
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.objectives.value import value_clipped
from areno_fn.steps.reduce import AGGREGATIONS
from areno_fn.testing import laws, strategies

STAGES: dict[str, tuple[Stage, st.SearchStrategy[Any]]] = {
    **{f"cross_entropy {how}": (cross_entropy(how, 4.0), strategies.scores()) for how in AGGREGATIONS},
    **{f"clipped {how}": (clipped(aggregation=how, constant=4.0), strategies.actions()) for how in AGGREGATIONS},
    "clipped dual": (clipped(dual=2.0), strategies.actions()),
    "clipped with a reference": (clipped(kl_coef=0.2), strategies.actions().filter(lambda a: a.reference is not None)),
    "clipped corrected": (clipped(importance_cap=1.5), strategies.actions().filter(lambda a: a.rollout is not None)),
    "sequence_clipped": (sequence_clipped(), strategies.actions()),
    "sequence_clipped corrected": (
        sequence_clipped(importance_cap=1.5),
        strategies.actions().filter(lambda a: a.rollout is not None),
    ),
    "preference smoothed": (preference(label_smoothing=0.1), strategies.comparisons()),
    **{f"preference {loss}": (preference(loss=loss), strategies.comparisons()) for loss in ("sigmoid", "ipo", "hinge")},
    **{
        f"value_clipped {how}": (value_clipped(aggregation=how, constant=4.0), strategies.estimates())
        for how in AGGREGATIONS
    },
}


@pytest.mark.parametrize("name", STAGES)
@settings(max_examples=8)
@given(data=st.data())
def test_what_has_weight_0_is_never_read(name: str, data: st.DataObject) -> None:
    stage, decisions = STAGES[name]
    laws.mask_blind(stage, data.draw(decisions))
