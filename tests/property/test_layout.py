"""Layouts are bijections: inverse laws over drawn layouts and over those of the families."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from ckpt_toys import LAYOUTS, random_bits, raw, same_bits
from hypothesis import given, settings

from areno_fn import tree
from areno_fn.contracts.layout import Iso, TensorSpec, concat, identity, product, rename, stack, tie, views_of
from areno_fn.models.decoder import DecoderConfig, shapes

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SIZES = st.integers(1, 4)


@st.composite
def simple(draw: st.DrawFn, name: str) -> Iso:
    """One primitive, or two in a row."""
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=3)))
    spec = TensorSpec(shape)
    kind = draw(st.sampled_from(["rename", "identity", "concat", "stack", "stacked", "tie", "split"]))
    if kind == "rename":
        return rename(f"{name}.in", name, spec)
    if kind == "identity":
        return identity({name: spec})
    if kind == "tie":
        return tie(name, [f"{name}.{i}" for i in range(draw(st.integers(1, 3)))], spec)
    if kind == "stack":
        names = [f"{name}.{i}" for i in range(draw(st.integers(1, 3)))]
        return stack(names, name, spec, draw(st.integers(-len(shape) - 1, len(shape))))
    if kind == "split":
        return joined(draw, f"{name}.part", shape, name).inverse
    if kind == "concat":
        return joined(draw, f"{name}.in", shape, name)
    experts = range(draw(st.integers(1, 3)))
    one = [concat({f"{name}.{e}.gate": spec, f"{name}.{e}.up": spec}, f"{name}.{e}") for e in experts]
    both = product(one)
    (whole,) = set(both.target.values())
    return both >> stack(list(both.target), name, whole)


def joined(draw: st.DrawFn, prefix: str, shape: tuple[int, ...], target: str) -> Iso:
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    sizes = draw(st.lists(SIZES, min_size=1, max_size=4))
    axis = dim % len(shape)
    parts = {f"{prefix}{i}": TensorSpec((*shape[:axis], n, *shape[axis + 1 :])) for i, n in enumerate(sizes)}
    return concat(parts, target, dim)


@st.composite
def isos(draw: st.DrawFn) -> Iso:
    """Layouts side by side, then perhaps another over all that they make."""
    made = product(draw(simple(f"leaf{i}")) for i in range(draw(st.integers(1, 3))))
    if draw(st.booleans()):
        made = made >> product(rename(name, f"{name}.out", spec) for name, spec in made.target.items())
    same = [name for name, spec in made.target.items() if spec == next(iter(made.target.values()))]
    if draw(st.booleans()):
        rest = {name: spec for name, spec in made.target.items() if name not in same}
        made = made >> (stack(same, "all", made.target[same[0]]) | identity(rest))
    return made


def drawn_tensors(iso: Iso, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Any bits on the source side; the names of a tied leaf get the same ones."""
    generator = torch.Generator().manual_seed(seed)
    leaves = {name: random_bits(spec.shape, dtype, generator) for name, spec in iso.target.items()}
    return {name: tensor.clone() for name, tensor in iso.inverse(leaves).items()}


@settings(max_examples=300)
@given(isos(), DTYPES, st.integers(0, 2**31))
def test_inverse_law(iso: Iso, dtype: torch.dtype, seed: int) -> None:
    given_side = drawn_tensors(iso, dtype, seed)
    there = iso(given_side)
    assert list(there) == list(iso.target)
    assert all(tuple(there[name].shape) == spec.shape for name, spec in iso.target.items())
    assert same_bits(iso.inverse(there), given_side)
    assert same_bits(iso(iso.inverse(there)), there)
    assert iso.inverse.inverse.target == iso.target


@given(isos(), st.integers(0, 2**31))
def test_elements_are_moved_and_none_is_lost(iso: Iso, seed: int) -> None:
    sources = drawn_tensors(iso, torch.float32, seed)
    count = sum(spec.numel for spec in iso.target.values())
    numbers = torch.arange(count, dtype=torch.float32)
    leaves, place = {}, 0
    for name, spec in iso.target.items():
        leaves[name] = numbers[place : place + spec.numel].reshape(spec.shape)
        place += spec.numel
    back = iso.inverse(leaves)
    seen = torch.cat([back[name].reshape(-1) for name in sources]).unique()
    assert torch.equal(seen, numbers)


@given(isos(), st.integers(0, 2**31), st.data())
def test_sources_of_is_exactly_what_a_target_depends_on(iso: Iso, seed: int, data: st.DataObject) -> None:
    tied = {name for part in iso.parts if len(part.source) > 1 and "tie" in part.move for name in part.source}
    free = [name for name in iso.source if name not in tied]
    if not free:
        return
    changed = data.draw(st.sampled_from(free))
    before = drawn_tensors(iso, torch.float32, seed)
    after = {**before, changed: raw(before[changed]).bitwise_xor(1).view(torch.float32).reshape(before[changed].shape)}
    one, two = iso(before), iso(after)
    different = {name for name in one if not torch.equal(raw(one[name]), raw(two[name]))}
    depends = {name for name in iso.target if changed in iso.sources_of(name)}
    assert different == depends


@given(isos(), st.integers(0, 2**31))
def test_covering_views_fill_a_leaf_in_place(iso: Iso, seed: int) -> None:
    sources = drawn_tensors(iso, torch.bfloat16, seed)
    expected = iso(sources)
    for part in iso.parts:
        leaves = {n: torch.zeros(s.shape, dtype=torch.bfloat16) for n, s in part.target.items()}
        views = views_of(part.inverse, leaves)
        if views is not None:
            for name, view in views.items():
                view.copy_(sources[name])
            assert same_bits(leaves, {name: expected[name] for name in leaves})


@given(isos())
def test_parts_are_independent_and_whole(iso: Iso) -> None:
    assert sorted(name for part in iso.parts for name in part.source) == sorted(iso.source)
    assert sorted(name for part in iso.parts for name in part.target) == sorted(iso.target)
    assert all(set(names) <= set(part.source) for part in iso.parts for names in part.needs.values())


# ------------------------------------------------------------------------------------------------ families


@st.composite
def configs(draw: st.DrawFn, family: str) -> DecoderConfig:
    flag = st.booleans()
    kv = draw(st.integers(1, 3))
    bias = draw(flag) or family == "qwen2"
    return DecoderConfig(
        vocab_size=draw(st.integers(1, 9)),
        hidden_size=draw(st.integers(1, 9)),
        intermediate_size=draw(st.integers(1, 9)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=kv * draw(st.integers(1, 3)),
        num_kv_heads=kv,
        head_dim=2 * draw(st.integers(1, 3)),
        tie_embeddings=draw(flag),
        qkv_bias=bias,
        o_bias=bias and family != "qwen2",
        mlp_bias=draw(flag) and family == "llama",
        qk_norm=family == "qwen3",
    )


FAMILY = st.sampled_from(sorted(LAYOUTS))


@given(FAMILY.flatmap(lambda f: st.tuples(st.just(f), configs(f))), st.booleans(), DTYPES, st.integers(0, 2**31))
def test_inverse_law_of_the_families(
    drawn: tuple[str, DecoderConfig], head_in_file: bool, dtype: torch.dtype, seed: int
) -> None:
    family, config = drawn
    iso = LAYOUTS[family](config, head_in_file=head_in_file)
    given_side = drawn_tensors(iso, dtype, seed)
    there = iso(given_side)
    assert same_bits(iso.inverse(there), given_side)
    assert ("lm_head.weight" in iso.source) == head_in_file


@given(FAMILY.flatmap(lambda f: st.tuples(st.just(f), configs(f))))
def test_targets_are_the_leaves_of_the_model(drawn: tuple[str, DecoderConfig]) -> None:
    family, config = drawn
    iso = LAYOUTS[family](config, head_in_file=not config.tie_embeddings)
    leaves = {path: TensorSpec(tuple(leaf.shape)) for path, leaf in tree.leaves_with_path(shapes(config))}
    assert dict(iso.target) == leaves


@pytest.mark.parametrize("family", sorted(LAYOUTS))
def test_fused_leaves_hold_their_parts_in_order(family: str) -> None:
    """Every element of every leaf against a table written out by hand."""
    config = DecoderConfig(
        vocab_size=5, hidden_size=3, intermediate_size=2, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2,
        qkv_bias=True, o_bias=family != "qwen2", mlp_bias=family == "llama", qk_norm=family == "qwen3",
    )  # fmt: skip
    iso = LAYOUTS[family](config, head_in_file=True)
    numbered: dict[str, Any] = {}
    for place, (name, spec) in enumerate(iso.source.items()):
        numbered[name] = (1000 * place + torch.arange(spec.numel, dtype=torch.float32)).reshape(spec.shape)
    leaves = iso(numbered)
    attn, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    rows = [*numbered[attn + "q_proj.weight"], *numbered[attn + "k_proj.weight"], *numbered[attn + "v_proj.weight"]]
    assert len(rows) == 8 and torch.equal(leaves["layers.1.qkv"], torch.stack(rows))
    entries = [b for part in "qkv" for b in numbered[f"{attn}{part}_proj.bias"].tolist()]
    assert leaves["layers.1.qkv_bias"].tolist() == entries
    gate_up = [*numbered[mlp + "gate_proj.weight"], *numbered[mlp + "up_proj.weight"]]
    assert torch.equal(leaves["layers.1.gate_up"], torch.stack(gate_up))
    assert torch.equal(leaves["layers.1.down"], numbered[mlp + "down_proj.weight"])
    assert torch.equal(leaves["layers.1.o"], numbered[attn + "o_proj.weight"])
    assert torch.equal(leaves["layers.1.attn_norm"], numbered["model.layers.1.input_layernorm.weight"])
    assert torch.equal(leaves["layers.1.mlp_norm"], numbered["model.layers.1.post_attention_layernorm.weight"])
    assert torch.equal(leaves["embed"], numbered["model.embed_tokens.weight"])
    assert torch.equal(leaves["head"], numbered["lm_head.weight"])
    assert torch.equal(leaves["norm"], numbered["model.norm.weight"])
    if family == "qwen3":
        assert torch.equal(leaves["layers.1.q_norm"], numbered[attn + "q_norm.weight"])
        assert torch.equal(leaves["layers.1.k_norm"], numbered[attn + "k_norm.weight"])
    if family == "llama":
        entries = [b for part in ("gate", "up") for b in numbered[f"{mlp}{part}_proj.bias"].tolist()]
        assert leaves["layers.1.gate_up_bias"].tolist() == entries
        assert torch.equal(leaves["layers.1.down_bias"], numbered[mlp + "down_proj.bias"])
    if family != "qwen2":
        assert torch.equal(leaves["layers.1.o_bias"], numbered[attn + "o_proj.bias"])
