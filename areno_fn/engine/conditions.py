"""What requests become for a model, kept in memory: a text encoder is asked once about each.

A condition is a function of the request and the frozen parts alone: every request is encoded by itself, so that neither
the batch nor the order of rows shows in it, and a resumed run gets the same bits. Clean latents of what is trained on,
chosen or rejected, are never kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from areno_fn import tree
from areno_fn.contracts.errors import ArenoError, DivergenceError, ModelError
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.flow_adapter import ConditionPreparer
from areno_fn.contracts.media import Request
from areno_fn.contracts.pipeline_io import require_condition
from areno_fn.engine.parts import FrozenParts

MOST_BYTES = 8 << 30
"""How much is kept; what has not been asked for longest is forgotten first."""


class ConditionCache:
    """Conditions by the fingerprint of their request, in the memory of the host.

    Args:
        preparer: encodes one.
        parts: what it is encoded with.
        most_bytes: how much is kept.
    """

    def __init__(self, preparer: ConditionPreparer, parts: FrozenParts, most_bytes: int = MOST_BYTES) -> None:
        self._preparer = preparer
        self._parts = parts
        self._most = most_bytes
        self._kept: OrderedDict[tuple[str, bool], Conditions] = OrderedDict()
        self._bytes = 0

    def of(self, request: Request, *, negative: bool) -> Conditions:
        """The conditions of one request, with a first dimension of 1, on the CPU."""
        name = (request.fingerprint, negative)
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        made = self._encoded(request, negative)
        require_condition(made.positive, self._preparer.contract.family)
        found = tree.map(lambda x: x.detach().cpu(), made)
        _require_finite(found, request, self._preparer)
        self._kept[name] = found
        self._bytes += _size(found)
        while self._bytes > self._most and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1])
        return found

    def _encoded(self, request: Request, negative: bool) -> Conditions:
        parts = self._parts.of(self._preparer.contract.preparer)
        try:
            with torch.no_grad():
                return self._preparer.encode_conditions(parts, request, negative=negative)
        except ArenoError:
            raise
        except (ValueError, IndexError, OverflowError) as error:
            reason = " ".join(str(error).split())
            raise ModelError(
                f"{_named(self._preparer)} cannot encode the prompt {request.prompt!r:.60} ({reason:.200}); see whether each "
                f"tokenizer is that of its encoder"
            ) from error

    def stacked(self, requests: Sequence[Request], device: torch.device, *, negative: bool) -> Conditions:
        """The conditions of some requests, in their order."""
        each = [self.of(request, negative=negative) for request in requests]
        first, *others = each
        return tree.map(lambda *rows: torch.cat(rows).to(device), first, *others)


def _named(preparer: ConditionPreparer) -> str:
    return ", ".join(preparer.contract.preparer)


def _require_finite(conditions: Conditions, request: Request, preparer: ConditionPreparer) -> None:
    numbers = [leaf for leaf in tree.leaves(conditions) if leaf.is_floating_point()]
    if not all(bool(leaf.isfinite().all()) for leaf in numbers):
        raise DivergenceError(
            f"what {_named(preparer)} made of the prompt {request.prompt!r:.60} is not finite; load the frozen parts in float32, "
            f"with model.pipeline.dtype, or see whether their weights are finite"
        )


def _size(conditions: Conditions) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(conditions))
