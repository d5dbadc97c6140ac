"""The frozen parts of a pipeline while a run goes on: each is loaded once, when something first needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from areno_fn.contracts.components import Components, Located


class FrozenParts:
    """Parts by name, materialised as they are needed.

    Args:
        components: what is declared and there.
        load: reads one.
    """

    def __init__(self, components: Components, load: Callable[[Located], Any]) -> None:
        self.components = components
        self._load = load
        self._made: dict[str, Any] = {}

    @property
    def materialised(self) -> tuple[str, ...]:
        """The owners that have been loaded, in the order in which they were."""
        return tuple(self._made)

    def of(self, names: Iterable[str] | None) -> dict[str, Any]:
        """The parts that some names stand for, by these names; optional ones that are absent are left out.

        Args:
            names: which; None: those that have been materialised, and nothing is loaded.
        """
        if names is None:
            return dict(self._made)
        wanted = tuple(names)
        for part in self.components.located(wanted):
            if part.name not in self._made:
                self._made[part.name] = self._load(part)
        owners = {name: self.components.canonical(name) for name in wanted if self.components.has(name)}
        return {name: self._made[owner] for name, owner in owners.items()}
