"""Values of decisions: what a critic expects of a completion, before the token that is chosen there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from areno_fn.contracts.actions import Estimates
from areno_fn.contracts.batch import Experience, PackedTokens
from areno_fn.contracts.calls import checked
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.record import shown
from areno_fn.contracts.valued import Valued
from areno_fn.steps.token.checks import require_token_policy


@checked
def estimate(policy: TokenPolicy) -> Callable[[Valued, Experience], Estimates]:
    """A stage `(Valued, Experience) -> Estimates`.

    The value of a decision is that of the state it is made in: everything before the token chosen.

    Args:
        policy: the model of the trunk; only its `hidden` is called.

    Raises:
        SpecError: the policy has no `hidden`.
        RecordError: from the stage, which was given an experience without values or returns.
    """
    require_token_policy(policy, "hidden")

    def stage(params: Valued, batch: Experience) -> Estimates:
        if batch.values is None or batch.returns is None:
            raise RecordError("estimate needs an Experience with values and returns; give them to experience()")
        packed = batch.packed
        return Estimates(
            value=_values(policy, params, packed),
            old=batch.values,
            returns=batch.returns,
            weight=packed.weight,
            segments=packed.segments[packed.index],
            documents=packed.documents,
        )

    return stage


def values_of(policy: TokenPolicy) -> Callable[[Valued, PackedTokens], torch.Tensor]:
    """A function `(Valued, PackedTokens) -> values` float32 [M] without a gradient."""

    def stage(params: Valued, packed: PackedTokens) -> torch.Tensor:
        with torch.no_grad():
            return _values(policy, params, packed)

    return stage


def _values(policy: TokenPolicy, params: Valued, packed: PackedTokens) -> torch.Tensor:
    bounds = (packed.documents, packed.longest)
    hidden = policy.hidden(params.trunk, packed.tokens, packed.positions, packed.segments, bounds=bounds)
    # in float32, because returns are compared with it: bfloat16 would leave three digits
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if params.head.shape[1] != hidden.shape[1]:
        raise RecordError(
            f"Valued.head is {shown(params.head)}, but the trunk gives hidden states of width {hidden.shape[1]}; "
            f"it must be [1, {hidden.shape[1]}]"
        )
    return (hidden[packed.index].to(wide) @ params.head.to(wide).T).squeeze(1)
