"""Where a model can be adapted: its linear maps, found in the layout of its family.

A linear map is a matrix of the file, named `<module>.weight`, whose rows are rows of matrices of the parameter tree. So
every family that has a layout has sites, and no family names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch

from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.layout import Iso, Part, views_of

_WEIGHT = ".weight"
_ROUTERS = ("gate", "router")

Runs = tuple[tuple[str, int, int], ...]
"""Where rows of a file stand in the tree: (leaf, first row there, how many) for each stretch, in the order of the file."""


@attrs.frozen(kw_only=True)
class Site:
    """A linear map that can be adapted.

    Attributes:
        module: its name in the file, for example "model.layers.0.self_attn.q_proj".
        runs: where its rows stand: one stretch of one leaf, or several where a layout deals rows out by heads.
        columns: D, inputs.
    """

    module: str
    runs: Runs
    columns: int

    @property
    def rows(self) -> int:
        """E, outputs."""
        return sum(count for _, _, count in self.runs)

    @property
    def name(self) -> str:
        """The end of the module's name by which targets are usually given: its last part, or behind a number one more."""
        parts = self.module.split(".")
        first = len(parts) - 1
        while first and parts[first].isdigit():
            first -= 1
        return ".".join(parts[first:])

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
    return tuple(sorted(found, key=lambda site: (_natural(site.runs[0][0]), site.runs[0][1])))


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
    linear = [name for name in part.source if _is_linear(name)]
    shapes = [spec.shape for spec in (*part.source.values(), *part.target.values())]
    if not linear or any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
        return []
    runs = _runs_of_views(part) or _runs_of_rows(part)
    return [
        Site(module=name.removesuffix(_WEIGHT), runs=runs[name], columns=shapes[0][1])
        for name in linear
        if name in runs
    ]


def _runs_of_views(part: Part) -> dict[str, Runs]:
    """Where the rows of each source stand, if they are stretches of one leaf; empty if they are not."""
    ((leaf, spec), *others) = part.target.items()
    columns = spec.shape[1]
    views = {} if others else views_of(part.inverse, {leaf: torch.empty(spec.shape, device="meta")}) or {}
    if any(view.stride() != (columns, 1) or view.storage_offset() % columns for view in views.values()):
        return {}
    return {name: ((leaf, view.storage_offset() // columns, view.shape[0]),) for name, view in views.items()}


def _runs_of_rows(part: Part) -> dict[str, Runs]:
    """The same for any move of whole rows, found by numbering them; empty for one that tears rows apart or copies them."""
    heights = {name: spec.shape[0] for name, spec in part.source.items()}
    columns = next(iter(part.source.values())).shape[1]
    total = sum(heights.values())
    if sum(spec.shape[0] for spec in part.target.values()) != total:
        return {}
    across = torch.arange(columns, dtype=torch.int32)
    numbers = dict(zip(heights, torch.arange(total, dtype=torch.int32).split(list(heights.values())), strict=True))
    rows = part.apply({name: own[:, None].expand(-1, columns) for name, own in numbers.items()})
    order = part.apply({name: across.expand(height, -1) for name, height in heights.items()})
    whole = all(bool((x == x[:, :1]).all()) for x in rows.values()) and all(
        bool((x == across).all()) for x in order.values()
    )
    stand = {int(row): (leaf, place) for leaf, x in rows.items() for place, row in enumerate(x[:, 0].tolist())}
    if not whole or len(stand) != total:
        return {}
    return {name: _stretches([stand[row] for row in own.tolist()]) for name, own in numbers.items()}


def _stretches(places: list[tuple[str, int]]) -> Runs:
    runs: list[tuple[str, int, int]] = []
    for leaf, row in places:
        if runs and runs[-1][0] == leaf and row == runs[-1][1] + runs[-1][2]:
            runs[-1] = (leaf, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((leaf, row, 1))
    return tuple(runs)


def _is_linear(name: str) -> bool:
    """Whether a matrix of a file is that of a linear map, as its name says: not of an embedding, nor of a router."""
    last = name.removesuffix(_WEIGHT).rpartition(".")[2]
    return name.endswith(_WEIGHT) and "embed" not in last and last not in _ROUTERS


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
            f"{target!r} names {others[0]!r}, which cannot be adapted: routers and routed experts, embeddings and norms "
            f"have no adapters here; the linear maps are {known}"
        )


def _natural(path: str) -> tuple[tuple[int, int | str], ...]:
    """An order in which layer 10 comes after layer 9."""
    return tuple((0, int(word)) if word.isdigit() else (1, word) for word in path.split("."))
