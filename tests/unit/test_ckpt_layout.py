"""What a layout refuses, in its own words, and what it does to values it must not touch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ckpt_toys import LAYOUTS, random_bits, raw, small, state_dict

from areno_fn import tree
from areno_fn.contracts.errors import LayoutError
from areno_fn.contracts.layout import (
    ParamLayout,
    TensorSpec,
    bijection,
    concat,
    identity,
    product,
    rename,
    stack,
    tie,
)
from areno_fn.models.decoder import shapes

A = TensorSpec((2, 3))
B = TensorSpec((4, 3))
HALF = TensorSpec((2, 3), torch.bfloat16)


def zeros(spec: TensorSpec = A, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(spec.shape, dtype=dtype)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "target overlap": (
        lambda: rename("a", "x", A) | rename("b", "x", A),
        "the target key 'x' is claimed by two parts of a layout",
    ),
    "source overlap (K6)": (
        lambda: product([rename("lm_head.kernel", "x", A), rename("lm_head.kernel", "y", A)]),
        "the source key 'lm_head.kernel' is claimed by two parts of a layout",
    ),
    "two names of one target (K6)": (
        lambda: rename("lm_head.kernel", "head", A) | rename("lm_head.weight", "head", A),
        "the target key 'head' is claimed by two parts",
    ),
    "ends with other keys": (
        lambda: rename("a", "b", A) >> rename("c", "d", A),
        "two layouts do not meet: the first gives 'b', which the second does not take; "
        "the second takes 'c', which the first does not give",
    ),
    "ends with other shapes": (
        lambda: rename("a", "b", A) >> rename("b", "c", B),
        "the first gives 'b' as [2, 3], the second takes it as [4, 3]",
    ),
    "ends with other dtypes": (
        lambda: rename("a", "b", HALF) >> rename("b", "c", A),
        "the first gives 'b' as bfloat16 [2, 3], the second takes it as [2, 3]",
    ),
    "gap in the middle": (
        lambda: (rename("a", "b", A) | rename("c", "d", A)) >> rename("b", "e", A),
        "the first gives 'd', which the second does not take",
    ),
    "parts of other widths": (
        lambda: concat({"q": A, "k": TensorSpec((2, 4))}, "qkv"),
        "concat into 'qkv' along dimension 0: 'k' is [2, 4], which does not continue 'q', which is [2, 3]",
    ),
    "parts of other ranks": (
        lambda: concat({"q": A, "k": TensorSpec((2,))}, "qkv"),
        "'k' is [2], which does not continue 'q'",
    ),
    "parts of other dtypes": (lambda: concat({"q": A, "k": HALF}, "qkv"), "'k' is bfloat16 [2, 3]"),
    "no parts": (lambda: concat({}, "qkv"), "concat into 'qkv' needs at least one part"),
    "no such dimension": (lambda: concat({"a": A}, "b", 2), "concat into 'b': there is no dimension 2 among 2"),
    "scalars have no dimension": (lambda: concat({"a": TensorSpec(())}, "b"), "there is no dimension 0 among 0"),
    "stack twice": (lambda: stack(["a", "a"], "b", A), "stack into 'b' names 'a' twice"),
    "stack of none": (lambda: stack([], "b", A), "stack into 'b' needs at least one name"),
    "stack beyond": (lambda: stack(["a"], "b", A, 3), "stack into 'b': there is no dimension 3 among 3"),
    "tie twice": (lambda: tie("b", ["a", "a"], A), "tie of 'b' names 'a' twice"),
    "tie of none": (lambda: tie("b", [], A), "tie of 'b' needs at least one name"),
    "elements lost": (
        lambda: bijection({"a": B}, {"b": A}, lambda d: {"b": d["a"][:2]}, lambda d: {"a": d["b"]}),
        "'a' hold 12 elements, but 'b' hold 6; a layout keeps every element",
    ),
    "an empty side": (lambda: bijection({}, {"b": A}, dict, dict), "both sides of a layout need a tensor"),
    "a bad shape": (lambda: TensorSpec((2, -1)), "a shape holds integers of at least 0, received (2, -1)"),
    "a bool as a size": (lambda: TensorSpec((True,)), "a shape holds integers of at least 0, received (True,)"),
    "missing and unknown": (
        lambda: identity({"a": A, "b": B})({"a": zeros(), "c": zeros()}),
        "the tensors given do not fit the layout: 'b' is missing; 'c' is not declared",
    ),
    "every wrong shape": (
        lambda: identity({"a": A, "b": B})({"a": zeros(B), "b": zeros(A)}),
        "'a' is float32 [4, 3], declared [2, 3]; 'b' is float32 [2, 3], declared [4, 3]",
    ),
    "wrong dtype": (
        lambda: identity({"a": HALF})({"a": zeros()}),
        "'a' is float32 [2, 3], declared bfloat16 [2, 3]",
    ),
    "joining dtypes": (
        lambda: concat({"q": A, "k": A}, "x")({"q": zeros(), "k": zeros(dtype=torch.float16)}),
        "a layout does not convert, but the tensors of 'x' are of several kinds: "
        "'q' float32 [2, 3] on cpu, 'k' float16 [2, 3] on cpu",
    ),
    "ties that differ": (
        lambda: tie("embed", ["e", "h"], A)({"e": zeros(), "h": zeros() + 1}),
        "'e' and 'h' are tied, both are the leaf 'embed', but their values differ",
    ),
    "no such target": (lambda: rename("a", "b", A).sources_of("a"), "'a' is no target of this layout"),
    "a part that computes": (
        lambda: bijection({"a": A}, {"b": A}, lambda d: {"b": d["a"].double()}, lambda d: {"a": d["b"]})({"a": zeros()}),
        "the results of the part that makes 'b' do not fit the layout: 'b' is float64 [2, 3], declared float32 [2, 3]",
    ),
    "a part that makes other keys": (
        lambda: bijection({"a": A}, {"b": A}, lambda d: {"c": d["a"]}, lambda d: {"a": d["b"]})({"a": zeros()}),
        "'b' is missing; 'c' is not declared",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    build, words = REFUSED[name]
    with pytest.raises(LayoutError, match=re.escape(words)) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_tied_zeros_of_other_sign_differ() -> None:
    """Equal as numbers, not as bits: writing one back under both names would change the file."""
    with pytest.raises(LayoutError, match="tied"):
        tie("x", ["a", "b"], A)({"a": zeros(), "b": -zeros()})


def test_tied_nans_with_the_same_bits_are_equal() -> None:
    nan = torch.full((2, 3), float("nan"))
    assert torch.equal(raw(tie("x", ["a", "b"], A)({"a": nan, "b": nan.clone()})["x"]), raw(nan))


def test_N10_a_tied_leaf_is_one_tensor_under_both_names() -> None:
    both = tie("x", ["a", "b"], A).inverse({"x": zeros()})
    assert both["a"] is both["b"]


def test_splits_are_views_and_take_no_memory() -> None:
    iso = concat({"q": A, "k": B}, "qk")
    whole = torch.arange(18.0).reshape(6, 3)
    parts = iso.inverse({"qk": whole})
    assert {p.untyped_storage().data_ptr() for p in parts.values()} == {whole.untyped_storage().data_ptr()}
    assert parts["k"].tolist() == whole[2:].tolist()


def test_concat_along_the_last_dimension_with_unequal_parts() -> None:
    iso = concat({"a": TensorSpec((2, 1)), "b": TensorSpec((2, 2))}, "ab", dim=-1)
    made = iso({"a": torch.tensor([[0], [3]]), "b": torch.tensor([[1, 2], [4, 5]])})
    assert made["ab"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_stack_puts_the_new_dimension_where_it_is_asked_for() -> None:
    iso = stack(["a", "b"], "ab", TensorSpec((2,)), dim=1)
    assert iso({"a": torch.tensor([0, 1]), "b": torch.tensor([2, 3])})["ab"].tolist() == [[0, 2], [1, 3]]


def test_only_the_parts_that_meet_are_joined() -> None:
    """A composition of many leaves stays as many parts, so that a loader can go leaf by leaf."""
    wide = product(concat({f"{i}.q": A, f"{i}.k": A}, f"{i}.qk") for i in range(5))
    named = wide >> product(rename(f"{i}.qk", f"layers.{i}.qk", B) for i in range(5))
    assert [tuple(part.source) for part in named.parts] == [(f"{i}.q", f"{i}.k") for i in range(5)]
    assert named.sources_of("layers.3.qk") == ("3.q", "3.k")
    joined = named >> stack([f"layers.{i}.qk" for i in range(5)], "all", B)
    assert len(joined.parts) == 1 and len(joined.sources_of("all")) == 10


def test_meta_tensors_pass_through() -> None:
    iso = LAYOUTS["qwen3"](small(tie_embeddings=True), head_in_file=True)
    there = iso({name: torch.empty(spec.shape, device="meta") for name, spec in iso.source.items()})
    assert {name: tuple(x.shape) for name, x in there.items()} == {n: s.shape for n, s in iso.target.items()}


def test_declared_dtypes_are_kept_through_fusion() -> None:
    iso = concat({"a": HALF, "b": HALF}, "c") >> rename("c", "d", TensorSpec((4, 3), torch.bfloat16))
    assert iso.target["d"] == TensorSpec((4, 3), torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    given = {name: random_bits((2, 3), torch.bfloat16, generator) for name in "ab"}
    assert iso(given)["d"].dtype is torch.bfloat16


def test_param_layout_compares_leaves() -> None:
    iso = LAYOUTS["llama"](small(), head_in_file=True)
    ParamLayout(iso.target).check(dict(tree.leaves_with_path(shapes(small()))))
    with pytest.raises(LayoutError, match=re.escape("the leaves do not fit the layout: 'head' is missing")):
        ParamLayout(iso.target).check(dict(tree.leaves_with_path(shapes(small(tie_embeddings=True)))), "the leaves")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_K4_the_head_follows_the_file(tied: bool, present: bool) -> None:
    """No head in the file: the embedding is the head. A head in the file: one leaf if tied, else its own."""
    iso = LAYOUTS["llama"](small(tie_embeddings=tied), head_in_file=present)
    assert ("lm_head.weight" in iso.source) is present
    assert ("head" in iso.target) is (present and not tied)
    embed = iso.sources_of("embed")
    assert embed == (("model.embed_tokens.weight", "lm_head.weight") if present and tied else embed[:1])


def test_a_layout_of_many_tensors_has_one_part_a_leaf() -> None:
    config = small(num_layers=64, tie_embeddings=True)
    iso = LAYOUTS["llama"](config, head_in_file=False)
    assert len(iso.source) == 64 * 9 + 2 and len(iso.parts) == len(iso.target) == 64 * 6 + 2
    given = state_dict(iso)
    assert iso(given)["norm"] is given["model.norm.weight"]
