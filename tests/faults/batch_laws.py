"""Laws of what losses are given: pairs that stay pairs, values of the right states, a KL whose coefficient is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recipe_toys import POLICY, updates

from areno_fn import tree
from areno_fn.contracts.batch import Example, Pair
from areno_fn.contracts.spec import GRPO, Sampling
from areno_fn.contracts.valued import Valued
from areno_fn.steps.compose import accumulate, pipeline
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.recipes import ACTOR, REFERENCE, Algorithm
from areno_fn.steps.token.pack import pack
from areno_fn.steps.token.score import compare

F64 = torch.float64
SAMPLING = Sampling(max_tokens=5, temperature=0.9)


def _double(params: Any) -> Any:
    return tree.map(lambda x: x.double(), params)


def _alone(params: Any, tokens: list[int]) -> torch.Tensor:
    """Hidden states of one document that stands alone."""
    places = torch.arange(len(tokens))
    return POLICY.hidden(params, torch.tensor(tokens), places, torch.zeros_like(places))


def _document(prompt: list[int], answer: list[int]) -> Example:
    return Example(tokens=(*prompt, *answer), trained=(False,) * len(prompt) + (True,) * len(answer))


def pairs_stay_together(pair_batches: Callable[..., Any]) -> None:
    """Loss and gradient of five pairs in any budget, and dealt to two ranks, are the means over pairs that stand alone."""
    params = _double(POLICY.init())
    answers = [([5, 6], [7]), ([8], [9, 10, 11, 12]), ([1, 2, 3], [4, 5]), ([6], [7]), ([8, 9, 10, 11, 12], [13])]
    pairs = [
        Pair(chosen=_document([k + 1, 3], good), rejected=_document([k + 1, 3], bad))
        for k, (good, bad) in enumerate(answers)
    ]
    references = [torch.linspace(-3, -1, len(good) + len(bad), dtype=F64) for good, bad in answers]
    derive = accumulate(pipeline(compare(POLICY, Sampling()), preference(0.7)))
    point = tree.map(lambda x: x.clone().requires_grad_(), params)
    terms = []
    for pair, reference in zip(pairs, references, strict=True):
        logp = [_answer_logp(point, document) for document in pair.documents]
        before = reference.split([len(side) for side in logp])
        x = 0.7 * ((logp[0] - before[0]).sum() - (logp[1] - before[1]).sum())
        terms.append(torch.log1p(torch.exp(-x)))
    right = torch.stack(terms).mean()
    slopes = torch.autograd.grad(right, tree.leaves(point))
    for ranks in ([[0, 1, 2, 3, 4]], [[0, 2, 4], [1, 3]], [[4], [3, 2, 1, 0]]):
        for budget in (1, 9, 14, 1000):
            batches = [
                batch
                for rows in ranks
                for batch in pair_batches([pairs[i] for i in rows], [references[i] for i in rows], budget)
            ]
            gradient, sums = derive(params, batches)
            assert (sums.total / sums.weight).item() == pytest.approx(right.item(), rel=1e-9)
            for found, slope in zip(tree.leaves(gradient), slopes, strict=True):
                assert torch.allclose(found, slope, rtol=1e-7, atol=1e-10)


def _answer_logp(params: Any, document: Example) -> torch.Tensor:
    tokens = list(document.tokens)
    logp = POLICY.logits(params, _alone(params, tokens)).log_softmax(-1)
    return torch.stack([logp[i - 1, tokens[i]] for i, trained in enumerate(document.trained) if trained])


def values_over_turns(estimated: Callable[..., torch.Tensor]) -> None:
    """Two turns with a tool between and a tool behind: a decision's value is of what precedes its token, the next value
    is that of the next decision, nothing is discounted for a tool, and the score lands on the last decision."""
    trunk = _double(POLICY.init())
    head = torch.linspace(-1, 1, POLICY.width, dtype=F64)[None]
    valued = Valued(trunk=trunk, head=head)
    tokens = [3, 4, 11, 12, 5, 6, 7, 13, 14, 8]
    response = [False, False, True, True, False, False, False, True, True, False]
    other = _document([9, 2], [1, 1, 1])
    packed = pack([other, Example(tokens=tuple(tokens), trained=tuple(response))])
    places = [i for i, own in enumerate(response) if own]
    v = [float(_alone(trunk, tokens[:i])[-1] @ head[0]) for i in places]
    gamma, lam, score = 0.9, 0.8, 2.0
    rewards = [0.0, 0.0, 0.0, score]
    deltas = [rewards[t] + gamma * (v[t + 1] if t < 3 else 0.0) - v[t] for t in range(4)]
    right = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, 4)) for t in range(4)]
    mask = torch.tensor(response)
    found = estimated(POLICY, valued, packed, mask, score, gamma=gamma, lam=lam)
    assert found[mask].tolist() == pytest.approx(right, abs=1e-9)
    assert found[~mask].tolist() == [0.0] * 6


def coefficient_is_read(build: Callable[..., Algorithm]) -> None:
    """The KL of a whole completion is taken from its reward, times the coefficient of the specification."""
    for coefficient in (0.05, 0.5):
        spec = GRPO(samples=4, sampling=SAMPLING, kl_coef=coefficient, kl_in="reward", kl_estimator="k1", scale="none")
        (update,), batch, state = updates(spec, build=build)
        rollout = batch.rollout
        lowered = []
        for row, length in enumerate(rollout.lengths.tolist()):
            prompt = rollout.prompts.tokens[row, : rollout.prompts.lengths[row]].tolist()
            tokens = prompt + rollout.tokens[row, :length].tolist()
            logits = POLICY.logits(state.snapshots[REFERENCE], _alone(state.snapshots[REFERENCE], tokens)) / 0.9
            reference = logits.log_softmax(-1)
            said = [float(reference[len(prompt) + t - 1, tokens[len(prompt) + t]]) for t in range(length)]
            drawn = rollout.logp[row, :length].tolist()
            lowered.append(float(batch.rewards[row]) - coefficient * (sum(drawn) - sum(said)))
        groups = rollout.groups.tolist()
        right = []
        for row, group in enumerate(groups):
            members = [r for r, g in zip(lowered, groups, strict=True) if g == group]
            right += [lowered[row] - sum(members) / len(members)] * int(rollout.lengths[row])
        assert sorted(update.advantage.tolist()) == pytest.approx(sorted(right), abs=2e-5)
        assert not tree.equal(state.params[ACTOR], state.snapshots[REFERENCE])
