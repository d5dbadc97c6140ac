"""Held-out evaluation: generate, ask the evaluation rewards, report means. It never touches the state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from areno_fn.contracts.batch import Prompts, Rollout
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Sampling
from areno_fn.engine.text import completions, drawn
from areno_fn.world.rewards import Reward, score
from areno_fn.world.tokenizer import Tokenizer

TOTAL = "score"
"""What the weighted sum of the rewards is called beside their own names."""


@attrs.frozen(kw_only=True)
class EvaluationPlan:
    """What is evaluated.

    Attributes:
        rows: the held-out rows, passed to the rewards.
        prompts: token ids of each row's prompt.
        rewards: judges of the evaluation alone, independent of the training rewards.
        sampling: temperature 0 is greedy.
        every: steps between evaluations inside a phase; 0 means only before and after.
        batch: most sequences decoded at once.
    """

    rows: Sequence[Mapping[str, Any]]
    prompts: tuple[tuple[int, ...], ...]
    rewards: tuple[Reward, ...]
    sampling: Sampling
    every: int
    batch: int


@attrs.frozen(kw_only=True)
class EvaluationResult:
    """Mean rewards by name; `score` is their weighted sum. `texts` and `totals` are per row."""

    score: float
    means: dict[str, float]
    texts: tuple[str, ...]
    totals: tuple[float, ...]

    def metrics(self, family: str = "eval") -> dict[str, float]:
        """The means under the names of the metric table: `eval/...`, or `eval_ema/...` for those of an average."""
        return {f"{family}/{name}": value for name, value in self.means.items()} | {f"{family}/{TOTAL}": self.score}


Rollouts = Callable[..., Rollout]


def evaluate(
    plan: EvaluationPlan, rollout: Rollouts, params: Any, tokenizer: Tokenizer, key: Key, device: torch.device
) -> EvaluationResult:
    """Evaluates parameters on every held-out row.

    Args:
        rollout: what `areno_fn.steps.token.rollout.sampler` returned.
        key: the same for every evaluation of a run, so that sampled completions are comparable over time.
    """
    prompts = pad_prompts(plan.prompts, range(len(plan.prompts)), device)
    found = rollout(params, prompts, key, plan.sampling, max_rows=plan.batch)
    texts = completions(found, tokenizer)
    totals, parts = score(plan.rewards, plan.rows, texts, drawn=drawn(found))
    means = {name: sum(values) / len(values) for name, values in parts.items()}
    return EvaluationResult(score=sum(totals) / len(totals), means=means, texts=tuple(texts), totals=tuple(totals))


def pad_prompts(prompts: Sequence[Sequence[int]], rows: Sequence[int], device: torch.device) -> Prompts:
    """The prompts of some rows, right-padded; a prompt's id is its row, so draws do not depend on the batch.

    A row that is there again has an id of its own, beyond those of all rows.
    """
    chosen = [prompts[row] for row in rows]
    tokens = torch.zeros(len(chosen), max(len(p) for p in chosen), dtype=torch.int64)
    for i, prompt in enumerate(chosen):
        tokens[i, : len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(p) for p in chosen])
    seen: Counter[int] = Counter()
    ids = []
    for row in rows:
        ids.append(row + seen[row] * len(prompts))
        seen[row] += 1
    return Prompts(tokens=tokens.to(device), lengths=lengths.to(device), ids=torch.tensor(ids).to(device))
