"""A toy policy and critic, and every objective on them, for laws that hold whatever the objective is."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch

from areno_fn.contracts.actions import Actions, Comparisons, Estimates, Scores
from areno_fn.steps.compose import Objective, pipeline
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.objectives.value import value_clipped

HOWS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length")
DATA = ("old", "advantage", "reference", "rollout", "returns")
FEATURES = 3
Batch = dict[str, torch.Tensor]


def _said(params: Batch, batch: Batch, said: torch.Tensor) -> dict[str, Any]:
    """What is said of every decision, or `junk` where it is masked; and the decisions."""
    if "junk" in batch:
        said = torch.where(batch["weight"] == 0, batch["junk"], said)
    common = {name: batch[name] for name in ("weight", "segments")}
    return {"said": said, **common, "documents": int(batch["documents"])}


def _logp(params: Batch, batch: Batch) -> dict[str, Any]:
    fields = _said(params, batch, -(batch["x"] @ params["w"] + params["b"]).square())
    logp = fields.pop("said")
    return {"logp": logp, "entropy": logp.detach(), **fields}


def scored(params: Batch, batch: Batch) -> Scores:
    return Scores(**_logp(params, batch))


def acted(params: Batch, batch: Batch) -> Actions:
    return Actions(
        **_logp(params, batch), **{name: batch[name] for name in ("old", "advantage", "reference", "rollout")}
    )


def compared(params: Batch, batch: Batch) -> Comparisons:
    return Comparisons(**_logp(params, batch), reference=batch["reference"])


def valued(params: Batch, batch: Batch) -> Estimates:
    fields = _said(params, batch, batch["x"] @ params["w"] + params["b"])
    return Estimates(value=fields.pop("said"), **fields, old=batch["old"], returns=batch["returns"])


PAIRED: dict[str, Objective] = {
    "sigmoid": pipeline(compared, preference(0.5)),
    "label smoothing": pipeline(compared, preference(0.5, label_smoothing=0.2)),
    "ipo": pipeline(compared, preference(0.5, loss="ipo")),
    "hinge": pipeline(compared, preference(0.5, loss="hinge")),
}
OBJECTIVES: dict[str, Objective] = {
    **{f"cross_entropy {how}": pipeline(scored, cross_entropy(how, 4.0)) for how in HOWS},
    **{
        f"clipped {how}": pipeline(acted, clipped(0.2, 0.28, aggregation=how, constant=4.0, kl_coef=0.1))
        for how in HOWS
    },
    "clipped dual": pipeline(acted, clipped(0.2, 0.28, dual=1.3, importance_cap=1.5)),
    "sequence_clipped": pipeline(acted, sequence_clipped(0.05, 0.1, kl_coef=0.1, importance_cap=1.5)),
    **{f"value_clipped {how}": pipeline(valued, value_clipped(0.4, aggregation=how, constant=4.0)) for how in HOWS},
    **PAIRED,
}


def row(sizes: list[int], live: list[float], source: torch.Generator, params: Batch) -> Batch:
    """What is never split: a document, or a pair of them; `sizes` are their decisions, `live` all their weights."""
    count = sum(sizes)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    own = {
        "x": normal(count, FEATURES),
        "weight": torch.tensor(live, dtype=torch.float64),
        "segments": torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        "documents": torch.tensor(len(sizes)),
        **{name: normal(count) for name in DATA},
    }
    return {**own, "old": scored(params, own).logp + 0.3 * normal(count)}


def some_params(source: torch.Generator) -> Batch:
    return {
        "w": 0.5 * torch.randn(FEATURES, generator=source, dtype=torch.float64),
        "b": torch.randn((), generator=source, dtype=torch.float64),
    }


@st.composite
def problems(draw: st.DrawFn, documents: int) -> tuple[Batch, list[Batch]]:
    """Parameters, and rows of `documents` documents of 1 to 5 decisions, some of which do not count."""
    of_row = st.lists(st.integers(1, 5), min_size=documents, max_size=documents)
    sizes = draw(st.lists(of_row, min_size=1, max_size=6))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    params = some_params(source)
    weights = st.sampled_from([0.0, 1.0, 1.0])
    return params, [
        row(own, draw(st.lists(weights, min_size=sum(own), max_size=sum(own))), source, params) for own in sizes
    ]


def together(rows: list[Batch]) -> Batch:
    """Rows laid end to end."""
    joined = {name: torch.cat([r[name] for r in rows]) for name in ("x", "weight", *DATA)}
    counts = torch.stack([r["documents"] for r in rows])
    starts = counts.cumsum(0) - counts
    segments = torch.cat([r["segments"] + start for r, start in zip(rows, starts, strict=True)])
    return {**joined, "segments": segments, "documents": counts.sum()}
