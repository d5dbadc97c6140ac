"""Planted mistakes in what losses are given."""

from __future__ import annotations

from faults import batch_laws as laws
from faults import batch_plain as plain
from faults.case import Case

from areno_fn.steps import recipes
from areno_fn.steps.returns import gae, terminal_rewards
from areno_fn.steps.token.pairs import pair_batches
from areno_fn.steps.token.value import values_of

CASES: dict[str, Case] = {
    "pairs": (
        laws.pairs_stay_together,
        pair_batches,
        plain.pair_batches,
        (
            "chosen first, rejected behind",
            "documents sorted by length",
            "rejected first",
            "references of the other side",
        ),
    ),
    "values over turns": (
        laws.values_over_turns,
        plain.library_estimated(values_of, terminal_rewards, gae),
        plain.estimated,
        (
            "value of the state after the token",
            "bootstraps from the token beside",
            "tools are discounted",
            "a turn ends the episode",
            "score on the last token",
            "score on every token",
        ),
    ),
    "KL in the reward": (
        laws.coefficient_is_read,
        recipes.build,
        plain.kl_in_reward,
        (
            "coefficient not read",
            "added to the reward",
            "mean over tokens",
            "reference moves along",
            "reference without the temperature",
        ),
    ),
}
