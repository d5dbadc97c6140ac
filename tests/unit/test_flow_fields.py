"""The page on flow models lists every field of its algorithms with its default, as the records have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import NODEFAULT, Struct

from areno_fn.contracts import spec, spec_flow_noised
from areno_fn.contracts.spec_flow import FlowGrouped, Levels
from areno_fn.engine.specfile.commented import toml_value
from areno_fn.engine.specfile.types import default_of, plain_copy

PAGE = (Path(__file__).parents[2] / "docs/flow.md").read_text()
ALGORITHMS = [kind for kind in get_args(spec.AlgorithmSpec) if str(kind.__struct_config__.tag).startswith("flow_")]
DRAWN = [table for table in Levels.__subclasses__() if table.__module__.startswith("areno_fn.contracts")]


def shown(field: Any) -> str:
    default = default_of(field)
    if default is NODEFAULT:
        return f"`{field.name}`"
    if default is None:
        return f"`{field.name}` absent"
    if isinstance(default, dict) and default:
        made = field.default_factory()
        usual = plain_copy(type(made)())
        own = ", ".join(f"{key} = {toml_value(value)}" for key, value in default.items() if usual[key] != value)
        return f"`{field.name} = {{ {own} }}`" if own else f"`{field.name} = {{ }}`"
    return f"`{field.name} = {toml_value(default)}`"


def fields(table: type[Struct], without: tuple[str, ...] = ()) -> str:
    info = msgspec.inspect.type_info(table)
    assert isinstance(info, msgspec.inspect.StructType)
    return ", ".join(shown(field) for field in info.fields if field.name not in without)


def row(kind: type[Struct]) -> str:
    grouped = issubclass(kind, FlowGrouped)
    own = fields(kind, FlowGrouped.__struct_fields__ if grouped else ())
    return f"| `{kind.__struct_config__.tag}` | {'those, ' if grouped else ''}{own} |"


def name(table: type[Struct]) -> str:
    users = [k for k in ALGORITHMS if type(getattr(k(), "denoising", None)) is table]
    tags = ", ".join(f"`{kind.__struct_config__.tag}`" for kind in users)
    return f"`denoising` of evaluations, {tags}" if table is spec.Denoising else f"`denoising` of {tags}"


def table() -> list[str]:
    compared = f"| those that compare samples | {fields(FlowGrouped)} |"
    inner = [f"| {name(one)} | {fields(one)} |" for one in DRAWN]
    copies = f"| `old`, `sampler`, `slow` | {fields(spec_flow_noised.Forgetting)} |"
    pipeline = [
        f"| `model.pipeline` | {fields(spec.PipelineSpec)} |",
        f"| `streams` of `model.pipeline` | {fields(spec.StreamsSpec)} |",
    ]
    return [compared, *map(row, ALGORITHMS), *inner, copies, *pipeline]


@pytest.mark.parametrize("line", table())
def test_the_page_has_every_field_with_its_default(line: str) -> None:
    assert line in PAGE.splitlines()


def test_the_page_on_families_shows_rows_and_an_adapter_as_they_are() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/adding/flow_family.md").read_text()
    for module, name in (("flow_layouts", "FLOW_LAYOUTS"), ("pipelines", "PIPELINES")):
        block = page.split(f'{name}["z_image"] = ')[1].split("\nPIPELINES")[0].split("\n```")[0]
        assert "".join(block.split()) in "".join((root / f"areno_fn/models/{module}.py").read_text().split())
    adapter = (root / "areno_fn/models/z_image/adapter.py").read_text()
    for line in page.split("class ZImageAdapter")[1].split("```")[0].splitlines():
        if line.strip().startswith(("return", "words =", "device =")):
            assert line.strip() in adapter
