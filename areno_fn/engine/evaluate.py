"""Held-out evaluation: generate, ask the evaluation rewards, report means. It never touches the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Denoising, Sampling
from areno_fn.engine.medium import Medium
from areno_fn.world.clock import Stopwatch
from areno_fn.world.data_row import Row
from areno_fn.world.rewards import Reward, score

TOTAL = "score"
"""What the weighted sum of the rewards is called beside their own names."""


@attrs.frozen(kw_only=True)
class EvaluationPlan:
    """What is evaluated.

    Attributes:
        rows: the held-out rows, passed to the rewards.
        prompts: of each row, as the medium has them: its tokens, or its class.
        rewards: judges of the evaluation alone, independent of the training rewards.
        sampling: how samples are drawn; temperature 0 is greedy.
        every: steps between evaluations inside a phase; 0 means only before and after.
        batch: most samples drawn at once.
    """

    rows: Sequence[Row]
    prompts: tuple[Any, ...]
    rewards: tuple[Reward, ...]
    sampling: Sampling | Denoising
    every: int
    batch: int


@attrs.frozen(kw_only=True)
class EvaluationResult:
    """Mean rewards by name; `score` is their weighted sum. `samples`, texts or pictures, and `totals` are per row.

    `seconds` is how long it took, 0 where it is that of an earlier time.
    """

    score: float
    means: dict[str, float]
    samples: tuple[Any, ...]
    totals: tuple[float, ...]
    seconds: float = 0.0

    def metrics(self, family: str = "eval") -> dict[str, float]:
        """The means under the names of the metric table: `eval/...`, or `eval_ema/...` for those of an average."""
        return {f"{family}/{name}": value for name, value in self.means.items()} | {f"{family}/{TOTAL}": self.score}


def evaluate(plan: EvaluationPlan, medium: Medium, params: Any, key: Key, device: torch.device) -> EvaluationResult:
    """Evaluates parameters on every held-out row.

    Args:
        plan: what is evaluated.
        medium: draws and shows samples.
        params: as the medium draws with them.
        key: the same for every evaluation of a run, so that samples are comparable over time.
        device: where they are drawn.
    """
    watch = Stopwatch()
    found = medium.draw(params, plan.prompts, key, plan.sampling, device=device, max_rows=plan.batch)
    samples = medium.shown(found)
    totals, parts = score(plan.rewards, plan.rows, samples, drawn=medium.tokens(found))
    means = {name: sum(values) / len(values) for name, values in parts.items()}
    return EvaluationResult(
        score=sum(totals) / len(totals),
        means=means | medium.described(plan.rows, samples),
        samples=tuple(samples),
        totals=tuple(totals),
        seconds=watch.seconds(),
    )
