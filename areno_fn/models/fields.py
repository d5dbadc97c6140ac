"""`Fields`: reads a Hugging Face configuration strictly, so that nothing in it is ever ignored by accident."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from areno_fn.contracts.errors import ModelError

REQUIRED: Any = object()

_MOST = {
    "num_hidden_layers": 1000,
    "num_layers": 1000,
    "num_single_layers": 1000,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "vocab_size": 16_777_216,
    "num_embeds_ada_norm": 16_777_216,
    "max_position_embeddings": 1_000_000_000,
}
"""Counts of what a layout or a tensor has rows for: a damaged configuration would otherwise fill memory before it is refused."""


class Fields:
    """The fields of one table, each to be taken once; `finish` refuses those that nobody asked for.

    A field that is absent or null takes its default. Every refusal is a `ModelError` that names the field.
    """

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        """Args: table: the fields; where: what messages call the table."""
        self.where = where
        self._table = table
        self._left = dict.fromkeys(table)

    def error(self, sentence: str) -> ModelError:
        """The refusal that says `sentence` about this table."""
        return ModelError(f"{self.where}: {sentence}")

    def integer(self, name: str, *, default: Any = REQUIRED, least: int = 1) -> Any:
        """An integer of at least `least`; some counts have an upper bound too."""
        value = self._take(name, default)
        if value is None:
            return None
        if type(value) is not int or value < least:
            raise self.error(f"{name} must be an integer of at least {least}, received {value!r}")
        if value > _MOST.get(name, value):
            raise self.error(f"{name} must be at most {_MOST[name]}, received {value!r}")
        return value

    def number(
        self, name: str, *, default: Any = REQUIRED, above: float | None = None, least: float | None = None
    ) -> Any:
        """A finite number, as a float."""
        value = self._take(name, default)
        if value is None:
            return None
        if type(value) not in (int, float) or not abs(value) < float("inf"):
            raise self.error(f"{name} must be a number, received {value!r}")
        if above is not None and not value > above:
            raise self.error(f"{name} must be above {above}, received {value!r}")
        if least is not None and not value >= least:
            raise self.error(f"{name} must be at least {least}, received {value!r}")
        return float(value)

    def boolean(self, name: str, *, default: Any = REQUIRED) -> Any:
        """True or false."""
        return self._typed(name, default, bool, "true or false")

    def text(self, name: str, *, default: Any = REQUIRED) -> Any:
        """A string."""
        return self._typed(name, default, str, "text")

    def table(self, name: str) -> Any:
        """A nested table, or `None`."""
        return self._typed(name, None, Mapping, "a table")

    def strings(self, name: str) -> Any:
        """A list of strings, or `None`."""
        value = self._typed(name, None, list, "a list of text")
        if value is not None and not all(type(item) is str for item in value):
            raise self.error(f"{name} must be a list of text, received {value!r}")
        return value

    def integers(self, name: str, *, default: Any = REQUIRED, least: int = 0) -> Any:
        """A list of integers of at least `least`, as a tuple."""
        value = self._take(name, default)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(type(item) is int and item >= least for item in value):
            raise self.error(f"{name} must be a list of integers of at least {least}, received {value!r}")
        return tuple(value)

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuses a field that asks for something this library does not do: any value but null and `allowed`."""
        value = self._take(name, None)
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            shown = " or ".join(repr(a) for a in allowed) if allowed else "null"
            raise self.error(f"{name} is {reprlib.repr(value)}, which is not supported; it can only be {shown}")

    def skip(self, names: Iterable[str]) -> None:
        """Fields that say nothing about the function a model computes; a leading underscore marks such a field too."""
        for name in [*names, *(n for n in self._left if n.startswith("_"))]:
            self._left.pop(name, None)

    def finish(self) -> None:
        """Refuses what is left."""
        if self._left:
            raise self.error(
                f"the field {next(iter(self._left))!r} is unknown; remove it if the model does not depend on it"
            )

    def _typed(self, name: str, default: Any, kind: type, wanted: str) -> Any:
        value = self._take(name, default)
        if value is not None and not isinstance(value, kind):
            raise self.error(f"{name} must be {wanted}, received {value!r}")
        return value

    def _take(self, name: str, default: Any) -> Any:
        self._left.pop(name, None)
        value = self._table.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.error(f"{name} is missing")
        return default
