"""Whether every field of an algorithm does something: other values of it are tried on a run, and what that leaves is compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import attrs
import msgspec
from field_values import Place, changed, dotted, places, value_at
from msgspec import inspect

from areno_fn.contracts.errors import SpecError
from areno_fn.engine.specfile.types import plain_copy

Plain = dict[str, Any]


@attrs.frozen(kw_only=True)
class Sweep:
    """Algorithms, and what is tried of them.

    Attributes:
        kinds: the records by their tags.
        bases: settings with which every field can show itself.
        others: other values of what is no number and no choice, by the place of the field; of a table that may be absent,
            one.
        elsewhere: fields that only whole runs show, which have tests of their own.
        told: a digest of all that a run leaves, or a `SpecError` with the sentence that refuses it.
    """

    kinds: Mapping[str, Any]
    bases: Mapping[str, Plain]
    others: Mapping[str, list[Any]]
    told: Callable[[Any], bytes]
    elsewhere: Container[str] = ()
    _known: dict[str, bytes | str | None] = attrs.field(factory=dict, init=False)

    def base(self, kind: str) -> Plain:
        """The plain data of an algorithm with every field spelled out."""
        found: Plain = plain_copy(msgspec.convert({"kind": kind} | self.bases[kind], self.kinds[kind]))
        return found

    def silent(self, plain: Plain, among: Container[str] | None = None) -> list[str]:
        """The fields, with a value each, that change nothing and are not refused; those of some names alone.

        Of a choice every value must do something, of a number some value.
        """
        now = self._outcome(plain)
        assert isinstance(now, bytes), f"the settings to begin with are refused: {now}"
        found = []
        for place, info in self._places(plain, among):
            dead, done, known = [], False, False
            for value, after in self._effects(plain, place, info):
                known = True
                dead += [value] if after == now else []
                done = done or after != now
                if done and not _is_choice(info):
                    break
            if not known:
                found.append(f"{dotted(place)}: the test knows no other value of it")
            elif dead and (_is_choice(info) or not done):
                found.append(f"{dotted(place)}: {dead[0]!r} in the place of {value_at(plain, place)!r} does nothing")
        return found

    def idle(self, plain: Plain, names: Container[str]) -> set[str]:
        """Those of some fields that change nothing, by any value that is not refused; a field needs one such value."""
        found = set[str]()
        for place, info in self._places(plain, None):
            if dotted(place) in names:
                after = {said for _, said in self._effects(plain, place, info) if isinstance(said, bytes)}
                found |= {dotted(place)} if after == {self._outcome(plain)} else set()
        return found

    def contexts(self, kind: str, among: Container[str] | None) -> Iterator[tuple[str, Plain]]:
        """The algorithm with every other choice and without what may be left out; what is then refused is at its default."""
        first = self.base(kind)
        for place, info in list(self._places(first, among)):
            for value in self._others(place, info, value_at(first, place)) if _is_choice(info) else ():
                plain = self._made_legal(changed(first, place, value), place)
                if plain is not None:
                    yield f"{dotted(place)} = {json.dumps(value)}", plain

    def _places(self, plain: Plain, among: Container[str] | None) -> Iterator[tuple[Place, inspect.Type]]:
        for place, info in places(inspect.type_info(self.kinds[plain["kind"]]), plain):
            asked = not isinstance(info, inspect.StructType) and dotted(place) not in self.elsewhere
            if asked and (among is None or place[0] in among):
                yield place, info

    def _effects(self, plain: Plain, place: Place, info: inspect.Type) -> Iterator[tuple[Any, bytes | str]]:
        """What other legal values of a field lead to."""
        for value in self._others(place, info, value_at(plain, place)):
            found = self._outcome(changed(plain, place, value))
            if found is not None and value != value_at(plain, place):
                yield value, found

    def _others(self, place: Place, info: inspect.Type, value: Any) -> list[Any]:
        if dotted(place) in self.others:
            return [one for one in self.others[dotted(place)] if one != value]
        match info:
            case inspect.LiteralType():
                return [one for one in info.values if one != value]
            case inspect.BoolType():
                return [not value]
            case inspect.IntType():
                return [value + 1, value - 1, 2 * value, value + 50, 0, value // 2]
            case inspect.FloatType():
                return [value / 2, value * 2, value * 1.2, 0.0, value * 50, value / 50, value + 0.5, 1e-4]
        return []

    def _outcome(self, plain: Plain) -> bytes | str | None:
        """What a run leaves, the sentence with which it is refused, or nothing where a value is of no legal type."""
        name = json.dumps(plain)
        if name not in self._known:
            self._known[name] = self._tried(plain)
        return self._known[name]

    def _tried(self, plain: Plain) -> bytes | str | None:
        try:
            algorithm = msgspec.convert(plain, self.kinds[plain["kind"]])
        except msgspec.ValidationError:
            return None
        try:
            return self.told(algorithm)
        except SpecError as error:
            return str(error)

    def _made_legal(self, plain: Plain, kept: Place) -> Plain | None:
        """The algorithm with defaults in the place of what is refused beside a setting; None where that itself is."""
        for _ in range(8):
            said = self._outcome(plain)
            if not isinstance(said, str):
                return None if said is None else plain
            match = re.match(r"phases\.it\.algorithm\.([\w.]+):", said)
            place = tuple(match[1].split(".")) if match else ()
            usual = plain_copy(msgspec.convert({"kind": plain["kind"]}, self.kinds[plain["kind"]]))
            if not place or place == kept or not (_has(plain, place) and _has(usual, place)):
                return None
            plain = changed(plain, place, value_at(usual, place))
        return None


def _is_choice(info: inspect.Type) -> bool:
    return isinstance(info, inspect.LiteralType | inspect.BoolType | inspect.UnionType)


def _has(plain: Any, place: Place) -> bool:
    for key in place:
        if not isinstance(plain, dict) or key not in plain:
            return False
        plain = plain[key]
    return True
