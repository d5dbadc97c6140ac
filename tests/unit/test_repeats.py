"""In no list of names or numbers may one stand twice, but in the configuration of a family."""

from __future__ import annotations

from typing import Any

import msgspec
from all_records import FLOWS, TOKENS
from field_values import Place, changed, places
from msgspec import inspect

from areno_fn.contracts.spec import RunSpec
from areno_fn.engine.repeat_rules import repeat_problems
from areno_fn.engine.specfile.types import plain_copy, root

TEACHERS = {"kind": "flow_distill", "teachers": [{"path": "p", "data": ["a", "b"]}]}


def item_of(info: inspect.Type) -> Any:
    """A name or a number that a list may hold; None of lists of other things."""
    match info:
        case inspect.IntType():
            return 1
        case inspect.StrType():
            return "one"
        case inspect.LiteralType():
            return info.values[0]
    return None


def lists(plain: Any) -> dict[Place, Any]:
    """The places of lists of names or numbers, and what one may hold."""
    found = [
        (place, item_of(info.item_type)) for place, info in places(root(), plain) if isinstance(info, inspect.ListType)
    ]
    return {place: item for place, item in found if item is not None}


def test_what_is_named_twice_is_refused_wherever_it_stands() -> None:
    tried = set[str]()
    for table in (TOKENS, FLOWS):
        plain = plain_copy(msgspec.convert(table, RunSpec))
        plain = changed(plain, ("phases", 0, "algorithm"), TEACHERS) if table is FLOWS else plain
        assert not [*repeat_problems(msgspec.convert(plain, RunSpec))]
        for place, item in lists(plain).items():
            spec = msgspec.convert(changed(plain, place, [item, item]), RunSpec)
            (said,) = repeat_problems(spec)
            assert said.endswith(f"{place[-1]}.1: {item!r} is there twice; name it once"), said
            tried.add(str(place[-1]))
    assert tried >= {"trained", "blocks", "noisy", "targets", "paths", "data", "offload", "roles"}


def test_what_belongs_to_a_family_may_say_the_same_of_several_layers() -> None:
    plain = changed(TOKENS, ("model", "config"), {"layer_types": ["full", "full"]})
    assert not [*repeat_problems(msgspec.convert(plain, RunSpec))]
