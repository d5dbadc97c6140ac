"""Properties of the layout of qwen3_5_moe: the meaning of every leaf, and files there and back, on any number of ranks."""

from __future__ import annotations

from family_laws import Case, cases, require_files, require_meaning
from hypothesis import given, settings


@settings.get_profile("layouts")
@given(cases("qwen3_5_moe"))
def test_a_layout_of_qwen3_5_moe_puts_every_element_where_it_belongs(case: Case) -> None:
    require_meaning(case)


@settings.get_profile("layouts")
@given(cases("qwen3_5_moe", served=True))
def test_files_of_qwen3_5_moe_go_there_and_back(case: Case) -> None:
    require_files(case)
