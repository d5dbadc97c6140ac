"""What a model with one number a token says of whole documents, as reward models are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from areno_fn import tree
from areno_fn.contracts.batch import Example, PackedTokens
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.record import replace
from areno_fn.contracts.valued import Valued
from areno_fn.steps.token.pack import pack, plan
from areno_fn.steps.token.value import values_of

Documents = Sequence[Sequence[int]]


def judge(
    policy: TokenPolicy, micro_tokens: int, padding: int | None = None
) -> Callable[[Valued, Documents], torch.Tensor]:
    """A function `(Valued, documents) -> scores` float32 [B] on the CPU, without a gradient.

    A document's score is the number at its last token that is not `padding`, at its first where all are; this is what
    transformers' models for sequence classification give. What else is judged at the same time does not matter.

    Args:
        policy: the model of the trunk; only its `hidden` is called.
        micro_tokens: most tokens of documents that are read at once, as for `pack.plan`.
        padding: a token that is passed over at the end of a document.
    """
    values = values_of(policy)

    def judged(params: Valued, documents: Documents) -> torch.Tensor:
        scores = torch.empty(len(documents))
        for rows in plan([len(tokens) for tokens in documents], micro_tokens):
            packed = _packed([documents[row] for row in rows], padding)
            scores[rows] = values(params, tree.map(lambda x: x.to(params.head.device), packed)).float().cpu()
        return scores

    return judged


def _packed(documents: Documents, padding: int | None) -> PackedTokens:
    """Documents end to end, with one decision each: the place at which it is judged."""
    packed = pack([Example(tokens=tuple(tokens), trained=(False,) * len(tokens)) for tokens in documents])
    (starts,) = (packed.positions == 0).nonzero(as_tuple=True)
    index = starts + torch.tensor([_last(tokens, padding) for tokens in documents])
    return replace(packed, index=index, targets=packed.tokens[index], weight=torch.ones(len(documents)))


def _last(tokens: Sequence[int], padding: int | None) -> int:
    places = (place for place in reversed(range(len(tokens))) if tokens[place] != padding)
    return next(places, 0)
