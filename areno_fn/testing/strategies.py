"""Hypothesis strategies for the library's values: trees, documents, decisions, prompts, keys, settings, layouts, roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from areno_fn.contracts.batch import Prompts
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import record, static
from areno_fn.contracts.spec import Sampling

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "areno_fn.testing.strategies needs the package hypothesis; install it with: pip install 'areno-fn[test]'"
    ) from error

from areno_fn.testing.decision_strategies import actions, comparisons, estimates, experiences, pairs, scores
from areno_fn.testing.document_strategies import documents, packed, packed_tokens, split_batches
from areno_fn.testing.family_strategies import configs, families, layouts
from areno_fn.testing.layout_strategies import isos, state_dicts
from areno_fn.testing.role_strategies import role_trees

__all__ = [
    "DTYPES",
    "Node",
    "actions",
    "comparisons",
    "configs",
    "documents",
    "estimates",
    "experiences",
    "families",
    "isos",
    "keys",
    "layouts",
    "packed",
    "packed_tokens",
    "pairs",
    "prompts",
    "role_trees",
    "sampling",
    "scores",
    "split_batches",
    "state_dicts",
    "tensors",
    "trees",
]

Draw = Callable[..., Any]  # hypothesis's own DrawFn is a protocol that its bound method does not meet at run time
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


@record
class Node:
    """A record that `trees` builds: two children, the second of which may be absent, and a static name."""

    first: Any
    second: Any = None
    name: str = static(default="node")


def keys() -> st.SearchStrategy[Key]:
    """Keys of any 64-bit seed."""
    return st.integers(-(2**63), 2**63 - 1).map(Key.of)


@st.composite
def tensors(
    draw: Draw, *, dtypes: tuple[torch.dtype, ...] = DTYPES, max_dims: int = 3, max_side: int = 4
) -> torch.Tensor:
    """Small tensors of any bit pattern: NaNs, infinities, signed zeros and empty dimensions among them."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, max_side), max_size=max_dims))
    count = torch.Size(shape).numel() * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    return torch.tensor(list(data), dtype=torch.uint8).view(dtype).reshape(shape)


def trees(
    leaves: st.SearchStrategy[torch.Tensor] | None = None, *, min_leaves: int = 0, max_leaves: int = 8
) -> st.SearchStrategy[Any]:
    """Nestings of dicts, lists, tuples and records with tensors at the leaves.

    Args:
        leaves: what stands at the leaves; `tensors()` when None.
        min_leaves: fewest leaves.
        max_leaves: about the most leaves.
    """
    names = st.text("abcdefgh", min_size=1, max_size=3)

    def grown(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(names, children, max_size=3),
            st.builds(Node, first=children, second=st.none() | children, name=names),
        )

    grove = st.recursive(leaves or tensors(), grown, max_leaves=max_leaves)
    return grove.filter(lambda tree: len(pytree.tree_leaves(tree)) >= min_leaves) if min_leaves else grove


@st.composite
def prompts(draw: Draw, *, vocabulary: int = 32, max_rows: int = 4, max_length: int = 6) -> Prompts:
    """Right-padded prompts; what stands in the padding is arbitrary."""
    count = draw(st.integers(1, max_rows))
    lengths = draw(st.lists(st.integers(1, max_length), min_size=count, max_size=count))
    width = draw(st.integers(max(lengths), max_length))
    row = st.lists(st.integers(0, vocabulary - 1), min_size=width, max_size=width)
    ids = draw(st.lists(st.integers(0, 2**40), min_size=count, max_size=count, unique=True))
    return Prompts(
        tokens=torch.tensor(draw(st.lists(row, min_size=count, max_size=count))),
        lengths=torch.tensor(lengths),
        ids=torch.tensor(ids),
    )


def sampling(*, max_tokens: int = 6) -> st.SearchStrategy[Sampling]:
    """Sampling settings under which something is drawn (a temperature above 0), with and without truncation."""
    return st.builds(
        Sampling,
        max_tokens=st.integers(1, max_tokens),
        temperature=st.sampled_from((0.5, 0.7, 1.0, 1.3)),
        top_k=st.sampled_from((0, 1, 2, 5)),
        top_p=st.sampled_from((1.0, 0.95, 0.6)),
        min_p=st.sampled_from((0.0, 0.02, 0.2)),
    )
