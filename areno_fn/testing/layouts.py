"""Laws of what a layout means: every element stands where a plain function, written independently, puts it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from areno_fn.contracts.errors import LayoutError
from areno_fn.contracts.layout import Iso, Specs, Tensors
from areno_fn.contracts.placement import Placement, place, rank_name
from areno_fn.testing.elements import Numbering, index, moved, refusals, takes
from areno_fn.testing.isos import iso_roundtrip
from areno_fn.testing.plain_shards import plain_shard
from areno_fn.testing.sizes import require_some

Plain = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Leaves by their paths, made of the tensors of a file by indexing and concatenation."""

PlainShard = Callable[[dict[str, torch.Tensor], int], Mapping[str, torch.Tensor]]
"""What a rank holds of the leaves, by their paths."""

RANKS = (1, 2, 3, 4, 8)


def layout_agrees(iso: Iso, reference: Plain, *, file: Specs | None = None, left_out: Collection[str] = ()) -> None:
    """The leaves are exactly what a plain function makes of the same file.

    No round trip sees gate and up swapped, experts in another order or a square matrix transposed, since the way
    back undoes them; the elements of the file are numbered here, and each must stand where `reference` puts it.

    Args:
        iso: the layout.
        reference: `(tensors of the file) -> leaves by path`, written without the layout. It gets int64 tensors.
        file: every tensor that a file holds; what the layout claims, when None.
        left_out: patterns of tensors in `file` that the layout does not take.

    Raises:
        AssertionError: a tensor of the file that is not claimed, one that is claimed and not there, or the
            first leaf that differs: which element of the file stands where another belongs.
    """
    _require_claims(iso, iso.source if file is None else file, left_out)
    numbering = Numbering.of(iso.source)
    with refusals("the layout does not take the tensors that it declares"):
        tensors = takes(iso)
        leaves = moved(iso, tensors)
    try:
        made = reference(dict(tensors))
    except AssertionError as error:
        raise AssertionError(f"the reference refuses what the layout takes: {error or 'it says no more'}") from error
    except KeyError as error:
        raise AssertionError(f"the reference reads {error}, which the layout does not claim") from error
    expected = _require_leaves(made)
    _require_placed(leaves, expected, numbering, "the leaves")


def shards_agree(iso: Iso, reference: PlainShard, ranks: int) -> None:
    """Every rank holds what plain slicing gives it, and merging the ranks gives every leaf once.

    Args:
        iso: from the leaves to `rank_name(rank, leaf)`.
        reference: `(leaves, rank) -> what that rank holds, by leaf`, written without the layout.
        ranks: how many there are.

    Raises:
        AssertionError: names the rank, the leaf, the element that stands there and the one that belongs there.
        ValueError: there is no rank.
    """
    require_some(ranks, f"ranks={ranks} hold nothing", "give shards_agree 1 at least")
    iso_roundtrip(iso, dtypes=(torch.bfloat16,), exact_sources=False)
    numbering = Numbering.of(iso.source)
    with refusals("the placement does not take the leaves that it declares"):
        leaves = takes(iso)
        held = moved(iso, leaves)
    expected = {
        rank_name(rank, name): tensor for rank in range(ranks) for name, tensor in reference(dict(leaves), rank).items()
    }
    _require_placed(held, expected, numbering, f"what {ranks} ranks hold")


def placements_agree(
    leaves: Specs, placements: Mapping[str, Placement], ranks: Sequence[int] = RANKS
) -> tuple[int, ...]:
    """`shards_agree` of a whole tree with plain slicing, for several numbers of ranks.

    Args:
        leaves: the leaves of the tree.
        placements: how each is dealt.
        ranks: the numbers to try; those to which the leaves cannot be dealt are left out.

    Returns:
        The numbers of ranks that were tried and agree.

    Raises:
        AssertionError: as of `shards_agree`, or the leaves cannot even be dealt to one rank.
        ValueError: there is no number to try.
    """
    require_some(len(ranks), "ranks name no number", "give placements_agree 1 at least")
    agreed = []
    for count in ranks:
        placed = dealt(leaves, placements, count)
        if placed is None:
            continue

        def slices(tensors: dict[str, torch.Tensor], rank: int, count: int = count) -> dict[str, torch.Tensor]:
            return {name: plain_shard(tensors[name], placements[name], rank, count) for name in tensors}

        shards_agree(placed, slices, count)
        agreed.append(count)
    return tuple(agreed)


def dealt(leaves: Specs, placements: Mapping[str, Placement], ranks: int) -> Iso | None:
    """`place`, or None where the leaves cannot be dealt to so many ranks; one rank can always be served.

    Raises:
        AssertionError: the leaves cannot be dealt to one rank, or the placements are not those of the leaves.
    """
    if leaves.keys() != placements.keys():
        wrong = ", ".join(map(repr, sorted(leaves.keys() ^ placements.keys())))
        raise AssertionError(f"every leaf needs a placement and every placement a leaf, which is not so for {wrong}")
    try:
        return place(leaves, placements, ranks)
    except LayoutError as error:
        if ranks == 1:
            raise AssertionError(f"one rank holds every leaf whole, but this is refused: {error}") from error
        return None


def _require_leaves(made: object) -> dict[str, torch.Tensor]:
    if not isinstance(made, Mapping):
        raise AssertionError(f"the reference gives a {type(made).__name__}, it should be leaves by their paths")
    for name, leaf in made.items():
        if not isinstance(leaf, torch.Tensor) or not leaf.is_cpu:
            what = f"a tensor on {leaf.device}" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
            raise AssertionError(f"the reference gives {name!r} as {what}, it should be a tensor on the CPU")
    return dict(made)


def _require_claims(iso: Iso, held: Specs, left_out: Collection[str]) -> None:
    unclaimed = [name for name in held if name not in iso.source]
    forgotten = [name for name in unclaimed if not any(fnmatch.fnmatchcase(name, pattern) for pattern in left_out)]
    problems = [f"{name!r} is in the file, and the layout does not claim it" for name in forgotten]
    problems += [f"the layout claims {name!r}, which is not in the file" for name in iso.source if name not in held]
    problems += [
        f"the layout claims {name!r} as {spec}, in the file it is {held[name]}"
        for name, spec in iso.source.items()
        if name in held and spec.shape != held[name].shape
    ]
    if problems:
        raise AssertionError("; ".join(problems))


def _require_placed(received: Tensors, expected: Tensors, numbering: Numbering, what: str) -> None:
    absent = [name for name in expected if name not in received]
    extra = [name for name in received if name not in expected]
    if absent or extra:
        raise AssertionError(
            "; ".join(
                [f"{what} lack {', '.join(map(repr, absent))}"] * bool(absent)
                + [f"{what} have {', '.join(map(repr, extra))}, which should not be"] * bool(extra)
            )
        )
    for name, numbers in expected.items():
        if received[name].shape != numbers.shape:
            raise AssertionError(f"{name!r} is {list(received[name].shape)}, it should be {list(numbers.shape)}")
        wrong = (received[name] != numbers).flatten().nonzero()
        if wrong.numel():
            place = int(wrong[0])
            here, right = (int(tensor.flatten()[place]) for tensor in (received[name], numbers))
            raise AssertionError(
                f"element {index(place, tuple(numbers.shape))} of {name!r} is {numbering.name(here)}, "
                f"it should be {numbering.name(right)}"
            )
