"""The whole way from weights to a gradient against TRL on transformers: what a rollout drew, packed here and padded there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed; pip install 'areno-fn[test]' brings it")

from parity import trl_parts as theirs
from parity.test_models import build, to_params

from areno_fn import tree
from areno_fn.contracts.batch import Example, Pair, Prompts, Rollout
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import Sampling
from areno_fn.models.decoder_policy import DecoderPolicy
from areno_fn.steps.compose import accumulate, pipeline
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.preference import preference
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.token.experience import drawn_places, experience
from areno_fn.steps.token.pairs import decisions, pair_batches
from areno_fn.steps.token.rollout import sampler
from areno_fn.steps.token.score import act, compare

VARIANTS = ["llama-tied-mha", "qwen3"]
SAMPLING = Sampling(max_tokens=6, temperature=0.8)
PROMPTS = [[5, 9, 11, 3], [7], [2, 8, 4]]


def same_gradient(found: Any, model: Any, config: Any) -> None:
    """The gradient here is that which lies in the transformers model."""
    for parameter in model.parameters():
        parameter.data = parameter.grad  # so that one function lays out weights and gradients
    for ours, right in zip(tree.leaves(found), tree.leaves(to_params(model, config)), strict=True):
        assert right.abs().max() > 1e-4
        assert (ours - right).abs().max() < 1e-4 * right.abs().max()


def drawn(policy: DecoderPolicy, params: Any) -> Rollout:
    """Completions of three prompts, with log-probabilities recorded somewhat away from what the parameters say."""
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in PROMPTS], batch_first=True)
    lengths = torch.tensor([len(row) for row in PROMPTS])
    prompts = Prompts(tokens=tokens, lengths=lengths, ids=torch.arange(3))
    rollout = sampler(policy, range(20))(params, prompts, Key.of(8), SAMPLING, samples=3)
    noise = 0.3 * torch.randn(rollout.logp.shape, generator=torch.Generator().manual_seed(0))
    assert len(set(rollout.lengths.tolist())) > 2
    return replace(rollout, logp=torch.where(drawn_places(rollout), rollout.logp + noise, 0.0))


def padded(rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts padded on the left, completions on the right; tokens, and 1 where there is one."""
    before, places = rollout.prompts.lengths, drawn_places(rollout)
    width = int(before.max())
    rows = [
        torch.cat([torch.zeros(width - n, dtype=torch.int64), prompt[:n]])
        for prompt, n in zip(rollout.prompts.tokens, before.tolist(), strict=True)
    ]
    own = torch.arange(width) >= width - before[:, None]
    return torch.cat([torch.stack(rows), rollout.tokens], 1), torch.cat([own, places], 1).long()


LOW, HIGH = 0.05, 0.08
SURROGATES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "grpo": (lambda: clipped(LOW, HIGH, aggregation="seq_mean_token_mean", kl_coef=0.05), {"loss": "grpo"}),
    "dapo": (lambda: clipped(LOW, HIGH, kl_coef=0.05), {"loss": "dapo"}),
    "gspo": (lambda: sequence_clipped(LOW, HIGH, kl_coef=0.05), {"loss": "grpo", "level": "sequence"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SURROGATES)
def test_a_rollout_is_learned_from_alike(name: str, variant: str) -> None:
    """Packed without padding in several micro-batches here, in one padded batch there; temperature on both sides."""
    model, params, config = build(variant, "default")
    policy = DecoderPolicy(config)
    rollout = drawn(policy, params)
    advantages = torch.linspace(-1.5, 2.0, 9)
    places = drawn_places(rollout)
    reference = torch.where(places, rollout.logp - 0.2, 0.0)
    stage, options = SURROGATES[name]
    micro = experience(rollout, advantages, micro_tokens=16, reference=reference)
    assert len(micro) > 2
    gradient, sums = accumulate(pipeline(act(policy, SAMPLING), stage()))(params, micro)

    tokens, seen = padded(rollout)
    logp = theirs.drawn_logp(model, tokens, seen, length=rollout.tokens.shape[1], temperature=0.8)
    value, reported = theirs.surrogate_loss(
        logp, rollout.logp, advantages, places.long(), low=LOW, high=HIGH, beta=0.05, reference=reference, **options
    )
    assert (sums.total / sums.weight).item() == pytest.approx(value.item(), rel=1e-4, abs=1e-5)
    assert 0 < reported["clip_ratio/region_mean"] < 1
    value.backward()
    same_gradient(gradient, model, config)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_pairs_are_learned_from_alike(loss: Any, variant: str) -> None:
    model, params, config = build(variant, "default")
    policy = DecoderPolicy(config)
    answers = [([7, 9], [30]), ([12], [13, 14, 15, 16]), ([20, 21, 22], [23, 24])]
    pairs = [
        Pair(chosen=document(p, good), rejected=document(p, bad))
        for p, (good, bad) in zip(PROMPTS, answers, strict=True)
    ]
    source = torch.Generator().manual_seed(4)
    documents = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    width = max(len(d.tokens) for d in documents)
    tokens = torch.stack([padded_right(d.tokens, width) for d in documents])
    answer = torch.stack([padded_right([int(t) for t in d.trained], width) for d in documents])
    seen = torch.stack([padded_right([1] * len(d.tokens), width) for d in documents])
    before = torch.randn(6, width, config.vocab_size, generator=source)
    said = before[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    own = [said[row][answer[row, 1:].bool()] for row in range(6)]
    references = [torch.cat([own[k], own[k + 3]]) for k in range(3)]
    assert [len(r) for r in references] == [decisions(pair) for pair in pairs]

    stage = preference(0.3, loss=loss)
    gradient, sums = accumulate(pipeline(compare(policy, Sampling()), stage))(
        params, pair_batches(pairs, references, 12)
    )
    logits = model(input_ids=tokens, attention_mask=seen).logits
    value, _ = theirs.preference_loss(logits, before, tokens, answer, loss=loss, beta=0.3)
    assert (sums.total / sums.weight).item() == pytest.approx(value.item(), rel=1e-5)
    value.backward()
    same_gradient(gradient, model, config)


def document(prompt: list[int], answer: list[int]) -> Example:
    return Example(tokens=(*prompt, *answer), trained=(False,) * len(prompt) + (True,) * len(answer))


def padded_right(values: Any, width: int) -> torch.Tensor:
    return torch.tensor([*values, *[0] * (width - len(values))])
