"""Second implementations of what losses are given, by loops, each with mistakes that can be planted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from areno_fn.contracts.batch import JudgedRollout, PackedTokens, Pair, Pairs
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import GRPO
from areno_fn.contracts.state import TrainState
from areno_fn.contracts.valued import Valued
from areno_fn.steps import recipes
from areno_fn.steps.recipes import ACTOR, REFERENCE, Algorithm, Materials
from areno_fn.steps.token.pack import pack

Fault = str | None


def pair_batches(fault: Fault) -> Callable[..., list[Pairs]]:
    """One pair after the other, in the order they come, as long as the budget lasts."""

    def run(pairs: Sequence[Pair], references: Sequence[torch.Tensor], budget: int) -> list[Pairs]:
        documents = []
        for pair, reference in zip(pairs, references, strict=True):
            count = sum(pair.chosen.trained)
            documents += [(pair.chosen, reference[:count]), (pair.rejected, reference[count:])]
        if fault == "chosen first, rejected behind":
            documents = documents[0::2] + documents[1::2]
        if fault == "documents sorted by length":
            documents.sort(key=lambda one: -len(one[0].tokens))
        if fault == "rejected first":
            documents = [documents[i ^ 1] for i in range(len(documents))]
        if fault == "references of the other side":
            flat = [reference for _, reference in documents]
            ends = torch.cat([torch.cat([flat[i + 1], flat[i]]) for i in range(0, len(flat), 2)])
            sizes = [len(reference) for reference in flat]
            documents = [(d, r) for (d, _), r in zip(documents, ends.split(sizes), strict=True)]
        micro: list[list[Any]] = [[]]
        for start in range(0, len(documents), 2):
            both = documents[start : start + 2]
            if micro[-1] and sum(len(d.tokens) for d, _ in micro[-1] + both) > budget:
                micro.append([])
            micro[-1] += both
        return [Pairs(packed=pack([d for d, _ in part]), reference=torch.cat([r for _, r in part])) for part in micro]

    return run


def estimated(fault: Fault) -> Callable[..., torch.Tensor]:
    """The advantages of the decisions of document 1, one at a time."""

    def run(
        policy: Any, valued: Valued, packed: PackedTokens, mask: torch.Tensor, score: float, *, gamma: float, lam: float
    ) -> torch.Tensor:
        hidden = policy.hidden(valued.trunk, packed.tokens, packed.positions, packed.segments)
        said = (hidden @ valued.head.T)[:, 0]
        start = packed.segments.tolist().index(1)
        shift = 0 if fault == "value of the state after the token" else -1
        value = [float(said[start + t + shift]) for t in range(len(mask))]
        own = mask.tolist()
        counted = [t for t, here in enumerate(own) if here]
        lands = len(own) - 1 if fault == "score on the last token" else counted[-1]
        found, after, later, before = torch.zeros(len(own), dtype=said.dtype), 0.0, 0.0, len(own)
        for t in reversed(range(len(own))):
            if not own[t]:
                if fault == "tools are discounted":
                    after, later = gamma * lam * after, gamma * later
                continue
            bootstrap = later
            if fault == "bootstraps from the token beside" and t + 1 < len(own):
                bootstrap = value[t + 1]
            reward = score if t == lands or fault == "score on every token" else 0.0
            if fault == "a turn ends the episode" and before != t + 1:
                after, bootstrap = 0.0, 0.0
            after = reward + gamma * bootstrap - value[t] + gamma * lam * after
            later, before = value[t], t
            found[t] = after
        return found

    return run


def of_second_document(packed: PackedTokens, numbers: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Numbers of decisions, those of document 1 at its tokens; NaN at tokens that nobody decided on."""
    own = packed.segments[packed.index] == 1
    return torch.full(mask.shape, torch.nan, dtype=numbers.dtype).masked_scatter(mask, numbers[own])


def library_estimated(values_of: Any, terminal_rewards: Any, gae: Any) -> Callable[..., torch.Tensor]:
    """The same by the library's parts."""

    def run(
        policy: Any, valued: Valued, packed: PackedTokens, mask: torch.Tensor, score: float, *, gamma: float, lam: float
    ) -> torch.Tensor:
        values = of_second_document(packed, values_of(policy)(valued, packed), mask)[None]
        rewards = terminal_rewards(torch.tensor([score], dtype=values.dtype), mask[None])
        advantages, _ = gae(rewards, values, mask[None], gamma=gamma, lam=lam)
        return advantages[0]

    return run


def kl_in_reward(fault: Fault) -> Callable[..., Algorithm]:
    """An algorithm without a KL, whose rewards are lowered before it sees them."""

    def build(spec: GRPO, materials: Materials, loss: Any) -> Algorithm:
        inner = recipes.build(msgspec.structs.replace(spec, kl_coef=0.0), materials, loss)

        def begin(state: TrainState) -> TrainState:
            return replace(inner.begin(state), snapshots={REFERENCE: state.params[ACTOR]})

        def step(state: TrainState, batch: JudgedRollout) -> Any:
            snapshot = state.params[ACTOR] if fault == "reference moves along" else state.snapshots[REFERENCE]
            coefficient = 0.1 if fault == "coefficient not read" else spec.kl_coef
            lowered = [
                float(reward) + (1 if fault == "added to the reward" else -1) * coefficient * divergence
                for reward, divergence in zip(
                    batch.rewards, _divergences(spec, materials, snapshot, batch, fault), strict=True
                )
            ]
            return inner.step(state, replace(batch, rewards=torch.tensor(lowered)))

        return Algorithm(begin=begin, sample=inner.sample, step=step)

    return build


def _divergences(spec: GRPO, materials: Materials, params: Any, batch: JudgedRollout, fault: Fault) -> list[float]:
    """log-probability drawn with, less that of the reference, added up over every completion."""
    rollout, policy, found = batch.rollout, materials.policy, []
    for row, length in enumerate(rollout.lengths.tolist()):
        before = int(rollout.prompts.lengths[row])
        tokens = torch.cat([rollout.prompts.tokens[row, :before], rollout.tokens[row, :length]])
        places = torch.arange(len(tokens))
        logits = policy.logits(params, policy.hidden(params, tokens, places, torch.zeros_like(places)))
        temperature = 1.0 if fault == "reference without the temperature" else spec.sampling.temperature
        logp = (logits / temperature).log_softmax(-1)
        said = logp[places[before:] - 1, tokens[before:]]
        total = float((rollout.logp[row, :length] - said).sum())
        found.append(total / length if fault == "mean over tokens" else total)
    return found
