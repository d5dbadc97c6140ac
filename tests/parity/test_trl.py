"""Losses and estimates against TRL's own code, value and gradient, in float64, to 1e-6 and mostly far closer.

Where the two differ on purpose, the test says how: TRL divides by n - 1 where this library divides by n, and counts a
completion without a token in the denominator of a mean over completions, which is why none occurs here.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed; pip install 'areno-fn[test]' brings it")
pytest.importorskip(
    "trl.experimental.ppo", reason="this TRL has no PPO; pip install 'areno-fn[test]' brings one that has"
)

from parity import trl_parts as theirs

from areno_fn.contracts.actions import Actions, Comparisons, Estimates, Scores
from areno_fn.contracts.batch import Prompts, Rollout
from areno_fn.contracts.record import replace
from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.objectives.kl import kl
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.objectives.value import value_clipped
from areno_fn.steps.reduce import measure
from areno_fn.steps.returns import gae, terminal_rewards, whiten
from areno_fn.steps.token.experience import completion_kl

F64 = torch.float64
LENGTHS = (5, 1, 7, 3, 2, 7)
ROWS, WIDTH = len(LENGTHS), max(LENGTHS)
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
SOURCE = torch.Generator().manual_seed(11)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=SOURCE, dtype=F64)


LOGP = -normal(ROWS, WIDTH).abs() - 0.1
OLD = LOGP + 0.3 * normal(ROWS, WIDTH)
REFERENCE = LOGP + 0.4 * normal(ROWS, WIDTH)
DRAWN = (OLD + 0.5 * normal(ROWS, WIDTH)).float().double()  # TRL keeps what was recorded in float32
ADVANTAGES = torch.tensor([1.2, -0.7, -1.5, 0.4, 2.0, -1.0], dtype=F64)


def close(ours: Any, right: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(right), rtol=tolerance, atol=tolerance)


def slope(value: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(value, point)
    return gradient


def actions(logp: torch.Tensor, advantages: torch.Tensor = ADVANTAGES, **fields: torch.Tensor) -> Actions:
    """The drawn tokens of [B, T] tables laid end to end."""
    rows = torch.arange(ROWS)[:, None].expand(ROWS, WIDTH)[MASK]
    data = {"old": OLD, **fields}
    return Actions(
        logp=logp[MASK],
        weight=torch.ones(len(rows), dtype=F64),
        segments=rows,
        entropy=torch.zeros(len(rows), dtype=F64),
        advantage=advantages[rows],
        documents=ROWS,
        **{name: table[MASK] for name, table in data.items()},
    )


# ------------------------------------------------------------------------------------------ GRPO and GSPO

AGGREGATIONS = {
    "grpo": {"aggregation": "seq_mean_token_mean"},
    "bnpo": {"aggregation": "token_mean"},
    "dapo": {"aggregation": "token_mean"},
    "dr_grpo": {"aggregation": "constant_length", "constant": 9.0},
    "luspo": {"aggregation": "seq_mean_token_sum"},
}


def compare_surrogates(stage: Any, data: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    """The same numbers through both; TRL gets what `Actions` get, and what was measured is compared too."""
    point = LOGP.clone().requires_grad_()
    value, reported = theirs.surrogate_loss(point, OLD, ADVANTAGES, MASK.long(), **options)
    own = LOGP.clone().requires_grad_()
    sums = stage(actions(own, **data))
    loss = sums.total / sums.weight
    close(loss, value)
    gradient = slope(loss, own)
    close(gradient, slope(value, point))
    assert gradient.abs().max() > 0.01
    metrics = measure(sums)
    low, both = reported["clip_ratio/low_mean"], reported["clip_ratio/region_mean"]
    close(float(metrics["clip_fraction_low"]), low, 1e-6)
    close(float(metrics["clip_fraction"]), both, 1e-6)
    assert 0 < low < both < 1
    if "kl" in reported:
        close(float(metrics["kl"]), reported["kl"], 1e-6)
    return metrics


@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28)])
@pytest.mark.parametrize("loss", AGGREGATIONS)
def test_grpo(loss: str, low: float, high: float, kl_coef: float) -> None:
    stage = clipped(low, high, kl_coef=kl_coef, **AGGREGATIONS[loss])
    data = {"reference": REFERENCE} if kl_coef else {}
    options = {"loss": loss, "low": low, "high": high, "beta": kl_coef, "length": 9, **data}
    metrics = compare_surrogates(stage, data, **options)
    assert ("kl" in metrics) == bool(kl_coef)


@pytest.mark.parametrize("coef", [0.01, 0.5])
def test_the_entropy_bonus(coef: float) -> None:
    """A mean over tokens, as the losses are that are means over tokens; TRL has it for the others too."""
    entropy = 1 + normal(ROWS, WIDTH).abs()
    points = [(LOGP.clone().requires_grad_(), entropy.clone().requires_grad_()) for _ in range(2)]
    (logp, bent), (own, also) = points
    value, _ = theirs.surrogate_loss(logp, OLD, ADVANTAGES, MASK.long(), loss="bnpo", entropy=bent, entropy_coef=coef)
    sums = clipped(entropy_coef=coef)(replace(actions(own), entropy=also[MASK]))
    loss = sums.total / sums.weight
    close(loss, value)
    for ours, right in zip(
        torch.autograd.grad(loss, (own, also)), torch.autograd.grad(value, (logp, bent)), strict=True
    ):
        close(ours, right)


@pytest.mark.parametrize("bound", [1.25, 1.5, 3.0])
def test_the_dual_clip_is_their_two_sided_clip(bound: float) -> None:
    """`delta` bounds the ratio, so from 1 + high upwards it is the same loss."""
    compare_surrogates(clipped(dual=bound), {}, loss="dapo", delta=bound)
    free = LOGP.clone().requires_grad_()
    sums = clipped()(actions(free))
    bounded = clipped(dual=bound)(actions(free))
    assert (bounded.total < sums.total) == (bound < 1.6)  # the largest ratio of a negative advantage


@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
def test_gspo(kl_coef: float) -> None:
    stage = sequence_clipped(0.05, 0.08, kl_coef=kl_coef)
    data = {"reference": REFERENCE} if kl_coef else {}
    compare_surrogates(stage, data, loss="grpo", level="sequence", low=0.05, high=0.08, beta=kl_coef, **data)


def judged(algorithm: str, rewards: torch.Tensor, **options: Any) -> Any:
    return theirs.judged(algorithm, rewards, LENGTHS, samples=3, old=OLD, **options)


@pytest.mark.parametrize("cap", [1.2, 2.0])
@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
def test_the_truncated_importance_of_tokens(cap: float, kl_coef: float) -> None:
    """What corrects for the rollout is made by TRL from the same tables, capped, and multiplies the first term alone."""
    options = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": cap}
    made = judged("grpo", ADVANTAGES, drawn=DRAWN, scale_rewards="none", **options)
    weights = made["importance_sampling_ratio"]
    assert (weights[MASK] == cap).any() and (weights[MASK] < cap).any()
    data = {"rollout": DRAWN} | ({"reference": REFERENCE} if kl_coef else {})
    theirs_too = {"reference": REFERENCE, "beta": kl_coef} if kl_coef else {}
    stage = clipped(importance_cap=cap, kl_coef=kl_coef)
    metrics = compare_surrogates(stage, data, loss="dapo", importance=weights, **theirs_too)
    reported = made["reported"]
    close(float(metrics["logp_diff_max"]), float((LOGP - DRAWN).abs()[MASK].max()), 1e-6)
    close(reported["sampling/importance_sampling_ratio/max"], cap, 1e-6)


# ------------------------------------------------------------------------------------------ advantages

REWARDS = torch.tensor([0.0, 1.0, 0.5, 2.0, 2.0, -1.0], dtype=F64)
GROUPS = torch.tensor([4, 4, 4, 1, 1, 1])


def rollout() -> Rollout:
    ids = torch.arange(ROWS)
    return Rollout(
        prompts=Prompts(tokens=torch.full((ROWS, 1), 3), lengths=torch.ones_like(ids), ids=ids),
        groups=GROUPS,
        ids=ids,
        tokens=torch.full((ROWS, WIDTH), 2),
        lengths=torch.tensor(LENGTHS),
        logp=OLD,
        finished=torch.ones(ROWS, dtype=torch.bool),
    )


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_leave_one_out_advantages_with_the_kl_in_the_reward(beta: float) -> None:
    expected = judged("rloo", REWARDS, beta=beta, reference=REFERENCE)["advantages"]
    lowered = REWARDS - beta * completion_kl(rollout(), REFERENCE, "k1")
    close(group_advantages(lowered, GROUPS, baseline="leave_one_out", scale="none"), expected)


def test_the_gradient_of_leave_one_out_where_nothing_has_moved() -> None:
    """TRL's ratio is of whole completions; at 1 its gradient is that of a sum over tokens."""
    point = LOGP.clone().requires_grad_()
    value = theirs.leave_one_out_loss(point, LOGP, ADVANTAGES, MASK.long())
    own = LOGP.clone().requires_grad_()
    sums = clipped(aggregation="seq_mean_token_sum")(actions(own, old=LOGP))
    close(slope(sums.total / sums.weight, own), slope(value, point))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages(scale: str) -> None:
    """Theirs are over std + 1e-4 with n - 1 in it, ours over std + 1e-8 with n."""
    expected = judged("grpo", REWARDS, scale_rewards=scale)["advantages"]
    found = group_advantages(REWARDS, GROUPS, scale=scale)
    of = {"group": REWARDS.view(2, 3), "batch": REWARDS[None], "none": None}[scale]
    if of is not None:
        factor = (of.std(1, correction=0) + 1e-8) / (of.std(1, correction=1) + 1e-4)
        found = (found.view(len(factor), -1) * factor[:, None]).flatten()
    close(found, expected, 1e-6)


# ------------------------------------------------------------------------------------------ PPO

VOCABULARY = 6


def ppo_case(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    rows, width = len(lengths), max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(2, VOCABULARY, (rows, width), generator=SOURCE)
    drawn = normal(rows, width, VOCABULARY)
    return {
        "mask": mask,
        "responses": torch.where(mask, tokens, theirs.PAD),
        "drawn": drawn,
        "logits": drawn + 0.4 * normal(rows, width, VOCABULARY),
        "reference": drawn + 0.3 * normal(rows, width, VOCABULARY),
        "old_values": normal(rows, width),
        "values": normal(rows, width),
        "scores": normal(rows),
    }


def of_tokens(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom:UserWarning")  # TRL's variance over one mini-batch
@pytest.mark.parametrize("lengths", [(4, 4, 4), (6, 2, 3, 5)])
@pytest.mark.parametrize(
    ("gamma", "lam", "kl_coef", "estimator"),
    [(1.0, 0.95, 0.05, "k1"), (0.97, 0.9, 0.2, "k3"), (0.9, 1.0, 0.3, "k1"), (1.0, 1.0, 0.0, "k3")],
)
def test_ppo_from_scores_to_both_gradients(
    lengths: tuple[int, ...], gamma: float, lam: float, kl_coef: float, estimator: str
) -> None:
    """Rewards less the KL, advantages, whitening, both losses and their gradients.

    TRL gives a response that ended a place of its own behind its last token, with a value, where the score lands; the
    mask of the critic below has that place too. It whitens by n - 1.
    """
    case = ppo_case(lengths)
    actor = theirs.Actor(case["logits"], case["values"])
    options = {"gamma": gamma, "lam": lam, "kl_coef": kl_coef, "kl_estimator": estimator}
    options |= {"cliprange": 0.2, "cliprange_value": 0.3, "vf_coef": 0.4}
    told = {name: case[name] for name in ("responses", "drawn", "reference", "old_values", "scores")}
    made = theirs.ppo_update(actor, **told, **options)

    mask, tokens = case["mask"], case["responses"]
    behind = torch.arange(mask.shape[1]) <= mask.sum(1)[:, None]
    old, reference = of_tokens(case["drawn"], tokens), of_tokens(case["reference"], tokens)
    divergence = torch.where(mask, kl(old, reference, estimator), 0.0)
    rewards = terminal_rewards(case["scores"], behind) - kl_coef * divergence
    advantages, returns = gae(rewards, case["old_values"], behind, gamma=gamma, lam=lam)
    close(advantages, made["advantages"])
    white, count = whiten(advantages, mask), int(mask.sum())
    close(white * math.sqrt((count - 1) / count), made["whitened"].masked_fill(~mask, 0.0), 1e-6)

    logits, values = case["logits"].clone().requires_grad_(), case["values"].clone().requires_grad_()
    rows = torch.arange(len(mask))[:, None].expand(mask.shape)
    policy = clipped(0.2, 0.2)(
        Actions(
            logp=of_tokens(logits, tokens)[mask],
            weight=torch.ones(count, dtype=F64),
            segments=rows[mask],
            entropy=torch.zeros(count, dtype=F64),
            old=old[mask],
            advantage=made["whitened"][mask],
            documents=len(mask),
        )
    )
    critic = value_clipped(0.3, coef=0.4)(
        Estimates(
            value=values[behind],
            old=case["old_values"][behind],
            returns=returns[behind],
            weight=torch.ones(int(behind.sum()), dtype=F64),
            segments=rows[behind],
            documents=len(mask),
        )
    )
    actor_loss, critic_loss = policy.total / policy.weight, critic.total / critic.weight
    close(actor_loss.item(), made["loss/policy_avg"], 1e-6)
    close(critic_loss.item(), 0.4 * made["loss/value_avg"], 1e-6)
    close((actor_loss + critic_loss).item(), made["loss"])
    close(slope(actor_loss, logits), actor.logits.grad)
    close(slope(critic_loss, values), actor.values.grad)
    close(measure(critic)["clip_fraction"].item(), made["val/clipfrac_avg"], 1e-6)
    assert 0 < made["policy/clipfrac_avg"] < 1 and 0 < made["val/clipfrac_avg"] < 1


# ------------------------------------------------------------------------------------------ pairs, and supervision


def pairs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, reference logits, tokens and answers of five pairs; the chosen documents first."""
    rows, width = 10, 6
    tokens = torch.randint(0, VOCABULARY, (rows, width), generator=SOURCE)
    starts, ends = torch.randint(1, 4, (rows, 1), generator=SOURCE), torch.randint(4, 7, (rows, 1), generator=SOURCE)
    places = torch.arange(width)
    answer = (places >= starts) & (places < ends)
    return normal(rows, width, VOCABULARY), normal(rows, width, VOCABULARY), tokens, answer.long()


LOGITS, REFERENCE_LOGITS, TOKENS, ANSWER = pairs()


def comparisons(logits: torch.Tensor) -> Comparisons:
    """The decisions of all answers; document 2k is the chosen one of pair k."""
    here = ANSWER[:, 1:].bool()
    count = len(TOKENS) // 2
    rows = torch.arange(len(TOKENS))
    documents = torch.where(rows < count, 2 * rows, 2 * (rows - count) + 1)[:, None].expand(here.shape)
    logp, reference = (of_tokens(x[:, :-1], TOKENS[:, 1:])[here] for x in (logits, REFERENCE_LOGITS))
    ones = torch.ones(len(logp), dtype=F64)
    return Comparisons(
        logp=logp, weight=ones, segments=documents[here], entropy=ones, reference=reference, documents=2 * count
    )


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge"])
def test_pairs(loss: str, beta: float) -> None:
    point, own = LOGITS.clone().requires_grad_(), LOGITS.clone().requires_grad_()
    value, reported = theirs.preference_loss(point, REFERENCE_LOGITS, TOKENS, ANSWER, loss=loss, beta=beta)
    sums = preference(beta, loss=loss)(comparisons(own))
    close(sums.total / sums.weight, value)
    close(slope(sums.total / sums.weight, own), slope(value, point))
    metrics = measure(sums)
    if loss != "ipo":  # whose rewards are means over tokens here and sums there
        close(float(metrics["dpo/margin"]), reported["rewards/margins"], 1e-6)
        close(float(metrics["dpo/accuracy"]), reported["rewards/accuracies"], 1e-6)
        close(float(metrics["dpo/chosen_reward"]), reported["rewards/chosen"], 1e-6)
        close(float(metrics["dpo/rejected_reward"]), reported["rewards/rejected"], 1e-6)


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
def test_label_smoothing_pair_by_pair(smoothing: float) -> None:
    """TRL's "sigmoid" has none any more; of a single pair, its "aot" is the smoothed loss."""
    point, own = LOGITS.clone().requires_grad_(), LOGITS.clone().requires_grad_()
    count = len(TOKENS) // 2
    values = []
    for k in range(count):
        rows = [k, k + count]
        value, _ = theirs.preference_loss(
            point[rows], REFERENCE_LOGITS[rows], TOKENS[rows], ANSWER[rows], loss="aot", beta=0.4, smoothing=smoothing
        )
        values.append(value)
    value = torch.stack(values).mean()
    sums = preference(0.4, label_smoothing=smoothing)(comparisons(own))
    close(sums.total / sums.weight, value)
    close(slope(sums.total / sums.weight, own), slope(value, point))


def test_supervision_is_the_mean_over_all_answer_tokens() -> None:
    """TRL's "sft" term of the preference trainer: the cross entropy of the chosen answers."""
    point, own = LOGITS.clone().requires_grad_(), LOGITS.clone().requires_grad_()
    value, _ = theirs.preference_loss(point, REFERENCE_LOGITS, TOKENS, ANSWER, loss="sft", beta=0.1)
    whole = comparisons(own)
    weight = (whole.segments % 2 == 0).to(F64)
    scores = Scores(
        logp=whole.logp, weight=weight, segments=whole.segments, entropy=whole.entropy, documents=whole.documents
    )
    sums = cross_entropy()(scores)
    close(sums.total / sums.weight, value)
    close(slope(sums.total / sums.weight, own), slope(value, point))
