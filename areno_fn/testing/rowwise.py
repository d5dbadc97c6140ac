"""The law of functions of rows: what a row becomes does not depend on the rows beside it, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from areno_fn import random, tree
from areno_fn.contracts.key import Key
from areno_fn.testing.sizes import require_some

_MORAL = "sum the elements of a row in one order, whatever the number of rows"


def batch_invariant(
    function: Callable[..., Any], *rows: torch.Tensor, sizes: Sequence[int] = (1, 7, 64, 256), orders: int = 1
) -> int:
    """Every row of a result has the same bits alone, among the first few, among the last few, and in another order.

        laws.batch_invariant(lambda x: ordered_linear(x, weight), x)

    Rollouts decode one row a sequence where training has one a token, so their numbers can only be equal to the bit where
    this law holds for all that both compute. Nothing is compared with a formula here.

    Args:
        function: takes the rows, and returns a tensor or a tree of tensors whose first dimension is that of the rows.
        rows: tensors [N, ...] that are cut and ordered alike.
        sizes: of the parts; those that are not below N are left out.
        orders: how many shuffles of all rows are tried.

    Returns:
        How many batches were compared with the whole.

    Raises:
        AssertionError: names the leaf of the result, the row, and in which batch how many elements differ, by how much.
        ValueError: there is no row, or nothing to compare.
    """
    count = rows[0].shape[0] if rows else 0
    require_some(count, "there are no rows", "give batch_invariant tensors with a row at least")
    sizes = [size for size in sizes if 0 < size < count]
    require_some(len(sizes) + orders, "no batch differs from the whole", "give batch_invariant a size below its rows")
    batches = [(f"the first {size} rows", torch.arange(size)) for size in sizes]
    batches += [(f"the last {size} rows", torch.arange(count - size, count)) for size in sizes]
    batches += [(f"shuffle {n} of all rows", random.permutation(Key.of(n), count)) for n in range(orders)]
    whole = function(*rows)
    for path, leaf in tree.leaves_with_path(whole):
        if leaf.ndim == 0 or leaf.shape[0] != count:
            raise AssertionError(
                f"{f'in {path} ' if path else ''}the result is {leaf.dtype} {list(leaf.shape)}, not one row for each of {count}"
            )
    for label, chosen in batches:
        chosen = chosen.to(rows[0].device)
        part = function(*(x.index_select(0, chosen) for x in rows))
        for (path, got), want in zip(tree.leaves_with_path(part), tree.leaves(whole), strict=True):
            _same(got, want.index_select(0, chosen), chosen, f"{label}{f', {path}' if path else ''}")
    return len(batches)


def _same(got: torch.Tensor, want: torch.Tensor, chosen: torch.Tensor, where: str) -> None:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(
            f"in {where} the result is {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}"
        )
    if tree.equal(got, want):
        return
    apart = (got != want) & ~((got != got) & (want != want))
    if not apart.any():
        raise AssertionError(f"in {where} the results differ in the sign of a zero or the bits of a NaN; {_MORAL}")
    place = int(apart.flatten(1).any(1).nonzero()[0]) if apart.ndim > 1 else int(apart.nonzero()[0])
    off = (got.double() - want.double()).abs()[apart].max()
    raise AssertionError(
        f"in {where} row {int(chosen[place])} is not what it is among all of them: {int(apart.sum())} elements differ, at most by "
        f"{float(off):.3g}; {_MORAL}"
    )
