"""Where a model can be adapted: its linear maps, found in the layout of its family.

A linear map is a matrix of the file, named `<module>.weight`, whose rows lie together in a matrix of the parameter
tree. So every family that has a layout has sites, and no family names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch

from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.layout import Iso, Part, views_of

_WEIGHT = ".weight"
_EMBEDDING = "embed"


@attrs.frozen(kw_only=True)
class Site:
    """A linear map that can be adapted.

    Attributes:
        module: its name in the file, for example "model.layers.0.self_attn.q_proj".
        leaf: path of the parameter that holds its weight.
        start: its first row in that parameter.
        rows: E, outputs.
        columns: D, inputs.
    """

    module: str
    leaf: str
    start: int
    rows: int
    columns: int

    @property
    def name(self) -> str:
        """The last part of the module's name, by which targets are usually given."""
        return self.module.rpartition(".")[2]

    @property
    def in_layer(self) -> bool:
        """Whether it belongs to one of the numbered layers."""
        return any(part.isdigit() for part in self.module.split("."))


def sites_of(layout: Iso) -> tuple[Site, ...]:
    """Every linear map of a model, by leaf and row.

    Args:
        layout: from the tensors of the file to the leaves.
    """
    found = (site for part in layout.parts for site in _sites(part))
    return tuple(sorted(found, key=lambda site: (_natural(site.leaf), site.start)))


def chosen(layout: Iso, targets: Sequence[str] = ()) -> tuple[Site, ...]:
    """The sites that targets name, as PEFT understands them: a module's name, or the end of it in whole parts.

    Args:
        layout: of the model.
        targets: all linear maps of the layers when empty.

    Raises:
        ModelError: a target names nothing, or something that cannot be adapted; or nothing can be.
    """
    sites = sites_of(layout)
    for target in targets:
        _require_adaptable(target, sites, layout)
    wanted = tuple(site for site in sites if names(targets, site.module) or (not targets and site.in_layer))
    if not wanted:
        raise ModelError("this model has no linear map in its layers that can be adapted; train it in full")
    return wanted


def names(targets: Iterable[str], module: str) -> bool:
    """Whether one of the targets names a module."""
    return any(module == target or module.endswith(f".{target}") for target in targets)


def shortest_targets(sites: Sequence[Site], layout: Iso) -> tuple[str, ...]:
    """Targets that name these sites and no other module of the model, for a configuration of PEFT."""
    modules = {site.module for site in sites}
    others = [name.removesuffix(_WEIGHT) for name in layout.source if name.removesuffix(_WEIGHT) not in modules]
    short = tuple(dict.fromkeys(site.name for site in sites))
    return short if not any(names(short, other) for other in others) else tuple(site.module for site in sites)


def _sites(part: Part) -> list[Site]:
    if len(part.target) != 1 or any(len(spec.shape) != 2 for spec in (*part.target.values(), *part.source.values())):
        return []
    ((leaf, spec),) = part.target.items()
    views = views_of(part.inverse, {leaf: torch.empty(spec.shape, device="meta")}) or {}
    return [
        Site(
            module=name.removesuffix(_WEIGHT),
            leaf=leaf,
            start=view.storage_offset() // spec.shape[1],
            rows=view.shape[0],
            columns=spec.shape[1],
        )
        for name, view in views.items()
        if name.endswith(_WEIGHT) and not _is_embedding(name) and _holds_rows(view, spec.shape[1])
    ]


def _holds_rows(view: torch.Tensor, columns: int) -> bool:
    """Whether a view of a matrix is some of its rows, one after the other."""
    return view.shape[1] == columns and view.stride() == (columns, 1) and view.storage_offset() % columns == 0


def _is_embedding(name: str) -> bool:
    return _EMBEDDING in name.removesuffix(_WEIGHT).rpartition(".")[2]


def _require_adaptable(target: str, sites: Sequence[Site], layout: Iso) -> None:
    adaptable = {site.module for site in sites}
    meant = [name.removesuffix(_WEIGHT) for name in layout.source if name.endswith(_WEIGHT)]
    meant = [module for module in meant if names((target,), module)]
    others = [module for module in meant if module not in adaptable]
    known = ", ".join(dict.fromkeys(site.name for site in sites))
    if not meant:
        raise ModelError(f"the model has no module {target!r}; its linear maps are {known}")
    if others:
        raise ModelError(
            f"{target!r} names {others[0]!r}, which cannot be adapted: routed experts, embeddings, norms and weights whose "
            f"rows do not lie together have no adapters here; the linear maps are {known}"
        )


def _natural(path: str) -> tuple[tuple[int, int | str], ...]:
    """An order in which layer 10 comes after layer 9."""
    return tuple((0, int(word)) if word.isdigit() else (1, word) for word in path.split("."))
