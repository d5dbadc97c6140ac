"""Every algorithm on a real model: neither micro-batches nor the order of rows changes its gradient beyond float32's noise.

Deviations are relative to the largest element of the gradient. The batches are what the public functions make of examples,
of pairs, and of a rollout that the model drew itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import attrs
import pytest
import torch

from areno_fn import random, tree
from areno_fn.contracts.batch import Example, Experience, Pair, Pairs, Prompts, Rollout
from areno_fn.contracts.key import Key
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.spec import Sampling
from areno_fn.contracts.valued import Valued
from areno_fn.models import FAMILIES, valued
from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.compose import Objective, accumulate, pipeline
from areno_fn.steps.joins import Stage
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.objectives.value import value_clipped
from areno_fn.steps.returns import gae, terminal_rewards, whiten
from areno_fn.steps.token.experience import drawn_places, experience, over_completions
from areno_fn.steps.token.pack import pack
from areno_fn.steps.token.pairs import pack_pairs
from areno_fn.steps.token.rollout import sampler
from areno_fn.steps.token.score import act, compare, reference_logp, score
from areno_fn.steps.token.value import estimate, values_of
from areno_fn.testing import laws

TOLERANCE = 1e-6
HOWS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length")
VOCABULARY, PROMPTS, SAMPLES = 61, 4, 4
SAMPLING = Sampling(max_tokens=9, temperature=0.9)
MODEL = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
Problem = tuple[Objective, Any, Any]
"""An objective, its parameters and its batch."""


@attrs.frozen(kw_only=True)
class Setting:
    """A model, what it was when it drew and what it was at first, a critic, and what was drawn."""

    policy: TokenPolicy
    params: Any
    drew: Any
    first: Any
    critic: Valued
    rollout: Rollout


def moved(params: Any, by: float, name: str) -> Any:
    """Parameters of which every element is another by about a share."""

    def leaf(path: str, x: torch.Tensor) -> torch.Tensor:
        noise = random.normal(Key.of(7).fold(name).fold(path), torch.arange(x.numel())).reshape(x.shape)
        return x * (1 + by * noise)

    return tree.map_with_path(leaf, params)


@cache
def setting() -> Setting:
    family = FAMILIES["qwen3"]
    config = family.config_from_hf(MODEL)
    policy = family.policy(config)
    # larger than a model's first weights, so that distributions are far from uniform
    first = tree.map(lambda x: 6 * x if x.ndim > 1 else x, family.init(config, Key.of(1)))
    drew = moved(first, 0.05, "drew")
    params = moved(drew, 0.05, "params")
    critic = valued.begin(params)
    critic = Valued(trunk=critic.trunk, head=random.normal(Key.of(8), torch.arange(32))[None] / 6)
    source = torch.Generator().manual_seed(2)
    prompts = Prompts(
        tokens=torch.randint(0, VOCABULARY, (PROMPTS, 8), generator=source),
        lengths=torch.randint(1, 9, (PROMPTS,), generator=source),
        ids=torch.arange(PROMPTS),
    )
    rollout = sampler(policy, (0, 1, 2, 3, 4))(drew, prompts, Key.of(3), SAMPLING, samples=SAMPLES)
    return Setting(policy=policy, params=params, drew=drew, first=first, critic=critic, rollout=rollout)


def examples(count: int) -> list[Example]:
    """Documents of 3 to 14 tokens, with prompts that are not trained."""
    source = torch.Generator().manual_seed(4)
    made = []
    for row in range(count):
        length = int(torch.randint(3, 15, (), generator=source))
        prompt = int(torch.randint(1, length, (), generator=source))
        tokens = torch.randint(0, VOCABULARY, (length,), generator=source).tolist()
        made.append(Example(tokens=tuple(tokens), trained=tuple(at >= prompt for at in range(length)), row=row))
    return made


def logp(params: Any) -> torch.Tensor:
    s = setting()
    refer = reference_logp(s.policy, SAMPLING)
    return over_completions(lambda packed: refer(params, packed), s.rollout, 1 << 20)


def rewards() -> torch.Tensor:
    """Whatever a judge says; each prompt's samples differ."""
    return torch.sin(1.7 * torch.arange(PROMPTS * SAMPLES))


def judged(advantages: torch.Tensor, **more: Any) -> Experience:
    (batch,) = experience(setting().rollout, advantages, micro_tokens=1 << 20, **more)
    return batch


# ------------------------------------------------------------------------------------------ the algorithms


def supervised(how: str) -> Problem:
    s = setting()
    return pipeline(score(s.policy, Sampling()), cross_entropy(how, 12.0)), s.params, pack(examples(16))


def preferring(**options: Any) -> Problem:
    s, rows = setting(), examples(16)
    packed = pack_pairs([Pair(chosen=a, rejected=b) for a, b in zip(rows[::2], rows[1::2], strict=True)])
    batch = Pairs(packed=packed, reference=reference_logp(s.policy, Sampling())(s.first, packed))
    return pipeline(compare(s.policy, Sampling()), preference(0.3, **options)), s.params, batch


def policy_gradient(loss: Stage, baseline: str = "group", scale: str = "group", **more: Any) -> Problem:
    s = setting()
    advantages = group_advantages(rewards(), s.rollout.groups, baseline=baseline, scale=scale)
    batch = judged(advantages, reference=logp(s.first), **more)
    return pipeline(act(s.policy, SAMPLING), loss), s.params, batch


def token_advantages() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of PPO: advantages, returns and values [B, T], with the KL from a reference in the reward of every token."""
    s = setting()
    places = drawn_places(s.rollout)
    judge = values_of(s.policy)
    values = over_completions(lambda packed: judge(moved(s.critic, 0.05, "old"), packed), s.rollout, 1 << 20)
    paid = terminal_rewards(rewards(), places) - 0.1 * (s.rollout.logp - logp(s.first))
    advantages, returns = gae(paid, values, places, gamma=0.99, lam=0.95)
    return whiten(advantages, places), returns, values


def proximal() -> Problem:
    s = setting()
    return pipeline(act(s.policy, SAMPLING), clipped(dual=3.0)), s.params, judged(token_advantages()[0])


def critic_of_ppo(how: str) -> Problem:
    s = setting()
    advantages, returns, values = token_advantages()
    batch = judged(advantages, values=values, returns=returns)
    return pipeline(estimate(s.policy), value_clipped(0.2, aggregation=how, constant=9.0)), s.critic, batch


def reinforce_plus() -> Problem:
    """With the KL of every token in its reward, whitened over the batch."""
    s = setting()
    places = drawn_places(s.rollout)
    paid = terminal_rewards(rewards(), places) - 0.1 * (s.rollout.logp - logp(s.first))
    to_go, _ = gae(paid, torch.zeros_like(s.rollout.logp), places, gamma=1.0, lam=1.0)
    return pipeline(act(s.policy, SAMPLING), clipped()), s.params, judged(whiten(to_go, places))


ALGORITHMS: dict[str, Callable[[], Problem]] = {
    **{f"sft {how}": lambda how=how: supervised(how) for how in HOWS},
    "dpo sigmoid": preferring,
    "dpo smoothed": lambda: preferring(label_smoothing=0.1),
    "dpo ipo": lambda: preferring(loss="ipo"),
    "dpo hinge": lambda: preferring(loss="hinge"),
    **{
        f"grpo {how}": lambda how=how: policy_gradient(
            clipped(0.2, 0.28, aggregation=how, constant=9.0, dual=3.0, kl_coef=0.1)
        )
        for how in HOWS
    },
    "grpo corrected": lambda: policy_gradient(clipped(importance_cap=1.2), old=logp(setting().drew) + 0.01),
    "grpo truncated": lambda: policy_gradient(clipped(), mask_truncated=True),
    "gspo": lambda: policy_gradient(sequence_clipped(0.05, 0.1, kl_coef=0.1)),
    "rloo": lambda: policy_gradient(clipped(), "leave_one_out", "none"),
    "reinforce++": lambda: policy_gradient(clipped(), "batch", "batch"),
    "reinforce++ per token": reinforce_plus,
    "ppo actor": proximal,
    **{f"ppo critic {how}": lambda how=how: critic_of_ppo(how) for how in HOWS},
}
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


@cache
def problem(name: str) -> Problem:
    return ALGORITHMS[name]()


@every_algorithm
def test_neither_micro_batches_nor_the_order_of_rows_change_the_gradient(name: str) -> None:
    objective, params, batch = problem(name)
    gradient, _ = accumulate(objective)(params, (batch,))
    assert max(float(x.abs().max()) for x in tree.leaves(gradient)) > 1e-3  # something is compared
    split = laws.accumulation_invariant(objective, params, batch, (1, 2, 3, 7), tolerance=TOLERANCE)
    mixed = laws.permutation_invariant(objective, params, batch, orders=2, tolerance=TOLERANCE)
    print(f"{name}: split {split:.2g}, in other orders {mixed:.2g}")


@every_algorithm
def test_what_remains_is_the_noise_of_float32(name: str) -> None:
    """In float64 the same deviations are nine digits smaller."""
    objective, params, batch = problem(name)
    laws.permutation_invariant(objective, wide(params), wide(batch), orders=1, tolerance=1e-13)


@every_algorithm
def test_what_is_masked_is_never_read(name: str) -> None:
    objective, params, batch = problem(name)
    laws.mask_blind(objective, params, batch)


def wide(value: Any) -> Any:
    return tree.map(lambda x: x.double() if x.is_floating_point() else x, value)
