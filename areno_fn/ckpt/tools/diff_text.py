"""What `diff` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from areno_fn.ckpt.tools.diff import Difference, Tie
from areno_fn.ckpt.tools.numbers import Side
from areno_fn.ckpt.tools.source import WORDS, Source
from areno_fn.ckpt.tools.text import first, many, size, spec, table
from areno_fn.ckpt.tools.ties import is_tied
from areno_fn.ckpt.words import brief


def title(letter: str, source: Source) -> str:
    """One line on what is compared."""
    kind = source.config.get("model_type")
    tied = ", tied" if is_tied(source.config) else ""
    nbytes = sum(source.entry(name).nbytes for name in source.files)
    what = f"{WORDS[source.kind]}{f' ({kind}{tied})' if kind else ''}"
    return f"{letter}: {source.path}: {what}, {many(len(source.files), 'tensor')}, {size(nbytes)}"


def lines(found: Difference, top: int) -> Iterator[str]:
    """The report: what differs in kind, then in numbers, then one line that sums it up.

    Args:
        found: the difference.
        top: the most lines of each list; 0 shows all.
    """
    yield from _listed("only in A", found.missing, top)
    yield from _listed("only in B", found.extra, top)
    for tie in found.ties:
        yield _tie(tie)
    for words, pairs in (("shapes", found.shapes), ("dtypes", found.dtypes)):
        yield from _listed(
            f"other {words}", [f"{n}: {spec(a)} in A, {spec(b)} in B" for n, (a, b) in pairs.items()], top
        )
    yield from _listed("other values", _pairs(found.values), top)
    yield from _listed("other fields of config.json, not counted", _pairs(found.config), top)
    yield from _zeros(found, top)
    yield from _not_finite(found, top)
    yield from _largest(found, top)
    yield summary(found)


def summary(found: Difference) -> str:
    """One line that sums it up."""
    if found.same:
        return f"Equal: {many(found.equal, 'tensor')}, bit for bit."
    counts = {
        "only in A": len(found.missing),
        "only in B": len(found.extra),
        "of another shape": len(found.shapes),
        "of another dtype": sum(1 for name in found.dtypes if name not in found.shapes),
        "of other numbers": sum(1 for name in found.unequal if name not in found.dtypes),
    }
    parts = [f"{count} {words}" for words, count in counts.items() if count]
    parts += [many(len(found.values), "other value")] if found.values else []
    return f"Different: {', '.join(parts)}; {many(found.equal, 'tensor')} bit-equal."


def _listed(words: str, items: tuple[str, ...] | list[str], top: int) -> Iterator[str]:
    if items:
        yield f"{words} ({len(items)}):"
        yield from (f"  {item}" for item in first(items, top))


def _pairs(values: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [f"{name}: {brief(a)} in A, {brief(b)} in B" for name, (a, b) in values.items()]


def _tie(tie: Tie) -> str:
    other = "B" if tie.only_in == "A" else "A"
    start = f"{tie.name} is only in {tie.only_in}; {other} ties it to {tie.embedding}"
    if tie.compared is None:
        return f"{start}, which has another shape."
    if not tie.compared.differing:
        return f"{start}, which holds the same bits."
    return f"{start}, which differs by {tie.compared.relative:.3g} relative."


def _zeros(found: Difference, top: int) -> Iterator[str]:
    filled = {name: c for name, c in found.tensors.items() if c.numel}
    yield from _listed("all zero in A alone", [n for n, c in filled.items() if c.a.zero and not c.b.zero], top)
    yield from _listed("all zero in B alone", [n for n, c in filled.items() if c.b.zero and not c.a.zero], top)
    yield from _listed("all zero in both", [n for n, c in filled.items() if c.a.zero and c.b.zero], top)


def _not_finite(found: Difference, top: int) -> Iterator[str]:
    odd = {n: c for n, c in found.tensors.items() if c.a.nan or c.a.inf or c.b.nan or c.b.inf}
    items = [f"{n}: {_bad(c.a)} in A, {_bad(c.b)} in B" for n, c in odd.items()]
    yield from _listed("not finite", items, top)


def _bad(side: Side) -> str:
    parts = [f"{side.nan} NaN"] * bool(side.nan) + [f"{side.inf} infinite"] * bool(side.inf)
    return " and ".join(parts) or "none"


def _largest(found: Difference, top: int) -> Iterator[str]:
    unequal = list(found.unequal.items())
    if not unequal:
        return
    shown = unequal[:top] if top else unequal
    yield f"largest relative differences ({len(shown)} of {len(unequal)}):"
    rows = [(f"{c.relative:.3g}", f"{c.largest:.3g}", f"{c.differing}", f"{c.numel}", name) for name, c in shown]
    yield from table(("relative", "max abs", "differing", "of", "tensor"), rows)
