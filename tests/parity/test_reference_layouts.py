"""The plain reference sees every swap: of two tensors that are joined, of two leaves, of rows dealt by head, of places."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs
import pytest
import torch
from family_laws import numbered_tensors, require_same_bits
from parity.reference_layouts import leaves
from parity.reference_ranks import part, servable

from areno_fn.contracts.placement import Replicated, rank_name, shard
from areno_fn.models.layouts import FAMILY_LAYOUTS, TokenLayout
from areno_fn.models.table import Dealt, Row, Table

Rows = tuple[Row | Dealt, ...]


def swapped(rows: Rows) -> Iterator[Rows]:
    """The rows with two things of one shape in each other's place, in every way."""
    for number, r in enumerate(rows):
        for i, j in itertools.combinations(range(len(r.parts)), 2):
            if r.parts[i][1] == r.parts[j][1]:
                parts = list(r.parts)
                parts[i], parts[j] = parts[j], parts[i]
                yield (*rows[:number], attrs.evolve(r, parts=tuple(parts)), *rows[number + 1 :])
    named = [(number, r) for number, r in enumerate(rows) if isinstance(r, Row)]
    for number, r in named:
        for further, other in named:
            if number < further and (r.columns, r.parts[0][1], len(r.parts)) == (
                other.columns,
                other.parts[0][1],
                len(other.parts),
            ):
                changed = list(rows)
                changed[number], changed[further] = attrs.evolve(r, leaf=other.leaf), attrs.evolve(other, leaf=r.leaf)
                yield tuple(changed)


def mutants(table: Table) -> Iterator[Table]:
    """The table with one of its sections changed; of sections with the same rows, the first."""
    seen = set()
    for number, section in enumerate(table.sections):
        if section.rows in seen:
            continue
        seen.add(section.rows)
        for rows in swapped(section.rows):
            sections = list(table.sections)
            sections[number] = attrs.evolve(section, rows=rows)
            yield attrs.evolve(table, sections=tuple(sections))


@pytest.mark.parametrize("family", FAMILY_LAYOUTS, ids=lambda family: family.name)
def test_two_tensors_or_leaves_in_each_others_place_are_seen(family: TokenLayout) -> None:
    count = 0
    for hf in family.variants.values():
        table = family.table(family.config_from_hf(hf))
        file = numbered_tensors(table.layout)
        whole = leaves(hf, file)
        require_same_bits(table.layout(file), whole)
        for mutant in mutants(table):
            count += 1
            with pytest.raises(AssertionError):
                require_same_bits(mutant.layout(file), whole)
    assert count >= 8, count


@pytest.mark.parametrize("family", FAMILY_LAYOUTS, ids=lambda family: family.name)
def test_a_leaf_that_is_not_shared_is_seen_on_two_ranks(family: TokenLayout) -> None:
    for hf in family.variants.values():
        assert servable(hf, 2)
        config = family.config_from_hf(hf)
        layout = family.layout(config)
        whole = layout(numbered_tensors(layout))
        for name, placement in family.placements(config).items():
            given, key = {name: whole[name]}, rank_name(1, name)
            expected = part(hf, name, whole[name], 1, 2)
            held = shard(name, layout.target[name], placement, 2)(given)[key]
            assert torch.equal(held, expected)
            if placement != Replicated():
                held = shard(name, layout.target[name], Replicated(), 2)(given)[key]
                assert not torch.equal(held, expected)
