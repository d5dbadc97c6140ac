"""The parts of a pipeline: what is declared, what stands for what, and who owns each physical part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import attrs

from areno_fn.contracts.errors import ModelError, SpecError

Kind = Literal["model", "tokenizer", "processor", "scheduler"]


@attrs.frozen(kw_only=True)
class Component:
    """A part that a family declares.

    Attributes:
        name: as in model_index.json.
        kind: a model has weights; the others are read from small files.
        optional: a pipeline may come without it.
        trained: its weights are the actor's; it is never loaded as a frozen part.
        alias: the component that this one is; empty where it is one of its own.
    """

    name: str
    kind: Kind = "model"
    optional: bool = False
    trained: bool = False
    alias: str = ""


@attrs.frozen(kw_only=True)
class Located:
    """A physical part: where it lies and what reads it.

    Attributes:
        name: of the component that owns it.
        kind: as declared.
        folder: where it lies, within the pipeline's folder, or a folder of its own where it was overridden.
        library, class_name: what reads it, as model_index.json says: transformers, diffusers, or one of its pipelines.
    """

    name: str
    kind: Kind
    folder: str
    library: str
    class_name: str


@attrs.frozen(kw_only=True)
class Components:
    """The declared parts of one pipeline, resolved against its model_index.json.

    An alias and an override can be addressed by name, but every physical part has one owner, which alone is
    materialised; an optional part that is absent keeps its name and is nobody's.

    Attributes:
        declared: by the family.
        index: what model_index.json says of each: (library, class), or None for one that is not there.
        overrides: other folders, by the component that they take the place of.

    Raises:
        SpecError: an override names nothing that can be overridden, or two components would own one folder.
        ModelError: a part that the family needs is not in the pipeline.
    """

    declared: tuple[Component, ...]
    index: Mapping[str, tuple[str, str] | None]
    overrides: Mapping[str, str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        names = [one.name for one in self.declared]
        for one in self.declared:
            if names.count(one.name) > 1:
                raise SpecError(f"component {one.name!r} is declared twice")
            if one.alias and (one.alias not in names or self._by_name(one.alias).alias):
                raise SpecError(f"component {one.name!r} is an alias of {one.alias!r}, which owns nothing")
            if not one.alias and not one.optional and self.index.get(one.name) is None:
                raise ModelError(f"model_index.json has no {one.name!r}, which this family needs")
        for name in self.overrides:
            if name not in names or self._by_name(name).alias or self._by_name(name).trained:
                free = ", ".join(one.name for one in self.declared if not one.alias and not one.trained)
                raise SpecError(f"{name!r} cannot be overridden; what can be is {free}")
        folders = [self._folder(name) for name in self.owners]
        for folder in folders:
            if folders.count(folder) > 1:
                two = " and ".join(name for name in self.owners if self._folder(name) == folder)
                raise SpecError(f"{two} would both own {folder}; every physical part has one owner")

    @property
    def owners(self) -> tuple[str, ...]:
        """The components that own a physical part which is there, in the order of their declaration."""
        return tuple(one.name for one in self.declared if not one.alias and self.index.get(one.name) is not None)

    def canonical(self, name: str) -> str:
        """The owner that a name stands for, itself for one that is no alias.

        Raises:
            SpecError: nothing has this name.
        """
        one = self._by_name(name)
        return one.alias or one.name

    def has(self, name: str) -> bool:
        """Whether the part that a name stands for is there."""
        return self.canonical(name) in self.owners

    def located(self, names: Iterable[str]) -> tuple[Located, ...]:
        """The physical parts that some names stand for, each once; optional ones that are absent are left out.

        Raises:
            SpecError: nothing has a name, or it is the part that is trained.
        """
        wanted = dict.fromkeys(self.canonical(name) for name in names)
        trained = [name for name in wanted if self._by_name(name).trained]
        if trained:
            raise SpecError(
                f"{trained[0]!r} is trained; its parameters are the actor's, and no frozen part is made of it"
            )
        return tuple(self._located(name) for name in wanted if name in self.owners)

    def _located(self, name: str) -> Located:
        entry = self.index[name]
        assert entry is not None, "an owner is there"
        library, class_name = entry
        return Located(
            name=name, kind=self._by_name(name).kind, folder=self._folder(name), library=library, class_name=class_name
        )

    def _folder(self, name: str) -> str:
        return self.overrides.get(name, name)

    def _by_name(self, name: str) -> Component:
        for one in self.declared:
            if one.name == name:
                return one
        raise SpecError(
            f"there is no component {name!r}; the components are {', '.join(c.name for c in self.declared)}"
        )
