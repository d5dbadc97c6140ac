"""Layouts: how the tensors of a file become the leaves of a parameter tree, and back.

An `Iso` is a total bijection between two declared families of tensors. It is built from small ones,
`a >> b` (then) and `a | b` (beside), and its inverse is derived, so that load and save are the two
directions of one value. A layout moves elements and never computes: no cast, no `1 + w`.

Whatever can be wrong is refused when the layout is built or when it meets its tensors, by a `LayoutError`.

    specs    what a tensor must be
    iso      the bijection: parts, composition, inversion
    moves    the primitives that move every element once
    copies   the primitives that state a tensor more than once, or with padding
"""

from areno_fn.contracts.layout.copies import pad, replicate, tie
from areno_fn.contracts.layout.iso import Iso, Part, bijection, describe, product, views_of
from areno_fn.contracts.layout.moves import (
    concat,
    deinterleave,
    identity,
    interleave,
    rename,
    reshape,
    split,
    stack,
    transpose,
    unstack,
)
from areno_fn.contracts.layout.specs import Move, ParamLayout, Specs, Tensors, TensorSpec, spec_of

__all__ = [
    "Iso",
    "Move",
    "ParamLayout",
    "Part",
    "Specs",
    "TensorSpec",
    "Tensors",
    "bijection",
    "concat",
    "deinterleave",
    "describe",
    "identity",
    "interleave",
    "pad",
    "product",
    "rename",
    "replicate",
    "reshape",
    "spec_of",
    "split",
    "stack",
    "tie",
    "transpose",
    "unstack",
    "views_of",
]
