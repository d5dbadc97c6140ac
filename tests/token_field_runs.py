"""Iterations of every algorithm of text on a table of bigrams, so small that hundreds are made in seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from toy_policy import Bigram

import areno_fn as af
from areno_fn import tree
from areno_fn.contracts.batch import Example, JudgedRollout, Pair, Prompts, Rollout
from areno_fn.contracts.spec import DPO, EMA, SGDSpec
from areno_fn.contracts.valued import Valued
from areno_fn.steps.recipes import Algorithm, Losses, Materials, build
from areno_fn.steps.token.pack import micro_batches
from areno_fn.steps.token.pairs import pack_pairs, pair_batches

POLICY = Bigram()
ITERATIONS = 2
AVERAGE = EMA(decay=0.5, schedule="constant")


def document(*tokens: int) -> Example:
    """A prompt of one token and an answer."""
    return Example(tokens=tokens, trained=(False, *(True for _ in tokens[1:])))


DOCUMENTS = (document(1, 2, 3, 4, 0), document(5, 6), document(2, 7, 0))
PAIRS = (
    Pair(chosen=document(1, 2, 3), rejected=document(1, 4)),
    Pair(chosen=document(5, 6), rejected=document(5, 7, 8, 0)),
)


def batch_of(algorithm: Algorithm, state: af.TrainState, spec: Any) -> Any:
    """Documents, pairs with what the reference says of them, or completions of three prompts with rewards."""
    if isinstance(spec, DPO):
        assert algorithm.refer is not None
        said = [algorithm.refer(state, pack_pairs([pair])).detach() for pair in PAIRS]
        return pair_batches(PAIRS, said, 1000)
    if algorithm.sample is None:
        return micro_batches(DOCUMENTS, 1000)
    tokens = torch.tensor([[3, 4, 5], [6, 7, 1], [2, 9, 1]])
    drawn = algorithm.sample(state, Prompts(tokens=tokens, lengths=torch.tensor([3, 2, 2]), ids=torch.arange(3)))
    assert isinstance(drawn, Rollout)
    return JudgedRollout(rollout=drawn, rewards=(drawn.tokens % 5).sum(1).float().sqrt())


def told(spec: Any, losses: Losses | None = None) -> bytes:
    """A digest of all that some iterations leave: what was drawn, metrics, and every number of every state.

    Raises:
        SpecError: the algorithm cannot be composed.
    """
    still = SGDSpec(lr=3.0, momentum=0.0, max_grad_norm=0.0, weight_decay=0.0)
    materials = Materials(
        policy=POLICY,
        optimizers={role: af.sgd(still, 100) for role in spec.roles},
        stop=(0,),
        ema=AVERAGE,
        max_length=20,
    )
    params = {
        "actor": POLICY.init(),
        "critic": Valued(trunk=POLICY.init(7), head=torch.linspace(-0.3, 0.3, POLICY.vocab_size)[None]),
    }
    algorithm = build(spec, materials, losses)
    state = algorithm.begin(
        af.TrainState(
            params={role: params[role] for role in spec.roles},
            optim={},
            snapshots={},
            counters=af.Counters(),
            key=af.Key.of(8),
            cursor=af.Cursor(),
        )
    )
    found = hashlib.sha256()
    for number in range(ITERATIONS):
        state = af.replace(state, cursor=af.Cursor(step=number))
        batch = batch_of(algorithm, state, spec)
        state, metrics = algorithm.step(state, batch)
        for leaf in _numbers(batch, state):
            found.update(leaf.detach().contiguous().numpy().tobytes())
        found.update(repr(sorted(metrics.items())).encode())
        found.update(repr(sorted(state.controls.items())).encode())
    return found.digest()


def _numbers(batch: Any, state: af.TrainState) -> Iterator[torch.Tensor]:
    yield from tree.leaves(batch)
    for part in (state.params, state.snapshots):
        for name in sorted(part):
            yield from tree.leaves(part[name])
