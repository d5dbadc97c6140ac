"""Mistakes planted in the layouts of real families, as public tools have made them; each is a layout that is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import attrs
import torch
from parity.reference_layouts import leaves
from parity.reference_ranks import part

from areno_fn.contracts.layout import (
    Iso,
    Tensors,
    TensorSpec,
    bijection,
    concat,
    identity,
    interleave,
    product,
    rename,
    replicate,
    spec_of,
    split,
    stack,
    transpose,
    unstack,
)
from areno_fn.contracts.placement import Placement, Split, place, rank_name
from areno_fn.models.layouts import LAYOUTS, TokenLayout
from areno_fn.models.table import HEAD
from areno_fn.testing.checkpoints import state_dict

LAYER = "model.layers.{}."


@attrs.frozen(slots=False)
class Model:
    """A tiny model of a family, with its layout as it should be.

    Attributes:
        hf: its config.json.
        head: its file has a tensor of the head.
    """

    hf: Mapping[str, Any]
    head: bool

    @property
    def family(self) -> TokenLayout:
        return LAYOUTS[self.hf["model_type"]]

    @cached_property
    def config(self) -> Any:
        return self.family.config_from_hf(self.hf)

    @cached_property
    def names(self) -> frozenset[str]:
        written = self.family.forms(self.config)[0] - {HEAD}
        return written | {HEAD} if self.head else written

    @cached_property
    def layout(self) -> Iso:
        return self.family.layout(self.config, self.names)

    @property
    def placements(self) -> dict[str, Placement]:
        return self.family.placements(self.config, self.names)

    @cached_property
    def state(self) -> dict[str, torch.Tensor]:
        """What its file holds, in the widest dtype, so that a cast cannot hide."""
        return state_dict(self.layout, dtypes=(torch.float32,))

    @property
    def file(self) -> dict[str, TensorSpec]:
        return {name: spec_of(tensor) for name, tensor in self.state.items()}

    def leaves(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By the plain reference."""
        if self.hf.get("tie_word_embeddings") and HEAD in tensors:
            assert torch.equal(tensors[HEAD], tensors["model.embed_tokens.weight"]), f"{HEAD!r} is not the embedding"
        return leaves(self.hf, tensors)

    def held(self, tensors: dict[str, torch.Tensor], rank: int, ranks: int) -> dict[str, torch.Tensor]:
        """What a rank holds of leaves, by the plain reference."""
        return {name: part(self.hf, name, tensor, rank, ranks) for name, tensor in tensors.items()}

    def placed(self, ranks: int, **changes: Placement) -> Iso:
        """From the leaves to ranks, with other placements for the leaves of the given last names."""
        chosen = {name: changes.get(name.split(".")[-1], rule) for name, rule in self.placements.items()}
        return place(self.layout.target, chosen, ranks)


# ------------------------------------------------------------------------------------------- into leaves


def before(model: Model, change: Iso) -> Iso:
    """A change of the tensors of the file, then the layout as it should be."""
    rest = {name: spec for name, spec in model.layout.source.items() if name not in change.source}
    return (change | identity(rest)) >> model.layout


def after(model: Model, change: Iso) -> Iso:
    """The layout as it should be, then a change of its leaves."""
    rest = {name: spec for name, spec in model.layout.target.items() if name not in change.source}
    return model.layout >> (change | identity(rest))


def swapped(model: Model, one: str, other: str) -> Iso:
    """Two tensors of the file, each under the name of the other."""
    spec = model.layout.source[one]
    return before(model, rename(one, other, spec) | rename(other, one, spec))


def wrong_concat_order(model: Model) -> Iso:
    leaf, config = "layers.1.qkv", model.config
    columns = model.layout.target[leaf].shape[1:]
    rows = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    parts = {name: TensorSpec((count * config.head_dim, *columns)) for name, count in rows.items()}
    return after(model, split(leaf, parts) >> concat({name: parts[name] for name in "kqv"}, leaf))


def _values(leaf: str, model: Model, there: Callable[..., Any], back: Callable[..., Any]) -> Iso:
    spec = {leaf: model.layout.target[leaf]}
    return bijection(spec, spec, lambda t: {leaf: there(t[leaf])}, lambda t: {leaf: back(t[leaf])})


def one_baked_into_norm(model: Model) -> Iso:
    return after(model, _values("norm", model, lambda w: w + 1, lambda w: w - 1))


def _through_bfloat16(w: torch.Tensor) -> torch.Tensor:
    return w.bfloat16().to(w.dtype) if w.is_floating_point() else w


def cast_in_the_layout(model: Model) -> Iso:
    return after(model, _values("layers.0.A_log", model, _through_bfloat16, _through_bfloat16))


def gate_and_up_swapped(model: Model) -> Iso:
    mlp = LAYER.format(1) + "mlp."
    return swapped(model, f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight")


def biases_of_k_and_v_swapped(model: Model) -> Iso:
    attn = LAYER.format(0) + "self_attn."
    return swapped(model, f"{attn}k_proj.bias", f"{attn}v_proj.bias")


def square_matrix_transposed(model: Model) -> Iso:
    leaf = "layers.0.o"
    return after(model, transpose(leaf, leaf, model.layout.target[leaf]))


def query_and_gate_as_two_blocks(model: Model) -> Iso:
    """The first half of the rows for queries and the second for gates, instead of a pair for each head."""
    name = LAYER.format(1) + "self_attn.q_proj.weight"
    whole = model.layout.source[name]
    halves = dict.fromkeys(("query", "gate"), TensorSpec((whole.shape[0] // 2, *whole.shape[1:])))
    return before(model, split(name, halves) >> interleave(halves, name, model.config.num_heads))


def experts_reversed(model: Model) -> Iso:
    leaf = "layers.0.expert_down"
    count, *shape = model.layout.target[leaf].shape
    each, names = TensorSpec(tuple(shape)), [str(e) for e in range(count)]
    return after(model, unstack(leaf, names, each) >> stack(names[::-1], leaf, each))


def experts_sorted_as_text(model: Model) -> Iso:
    """Expert 10 stands where expert 2 belongs."""
    name = LAYER.format(0) + "mlp.experts.{}.down_proj.weight"
    order = sorted(range(model.config.num_experts), key=str)
    spec = model.layout.source[name.format(0)]
    return before(model, product(rename(name.format(e), name.format(place), spec) for place, e in enumerate(order)))


def layer_off_by_one(model: Model) -> Iso:
    count = len([name for name in model.layout.target if name.endswith(".mlp_norm")])
    names = [LAYER.format(i) + "post_attention_layernorm.weight" for i in range(count)]
    spec = model.layout.source[names[0]]
    return before(model, product(rename(names[i - 1], names[i], spec) for i in range(count)))


def layer_missing(model: Model) -> Iso:
    return model.family.layout(attrs.evolve(model.config, num_layers=model.config.num_layers - 1), model.names)


def tied_head_as_a_second_leaf(model: Model) -> Iso:
    return model.family.layout(attrs.evolve(model.config, tie_embeddings=False), model.names)


def tied_head_that_is_not_compared(model: Model) -> Iso:
    """The head in the file is left unread, and the embedding is written in its place."""
    (tied,) = [p for p in model.layout.parts if HEAD in p.source]
    embed = next(name for name in tied.source if name != HEAD)
    loose = attrs.evolve(tied, forward=lambda t: {"embed": t[embed]})
    return Iso(tuple(loose if p is tied else p for p in model.layout.parts))


def head_that_the_file_has_not(model: Model) -> Iso:
    return model.family.layout(model.config, model.names | {HEAD})


def padded_vocabulary_in_the_file(model: Model) -> Iso:
    return model.family.layout(attrs.evolve(model.config, vocab_size=model.config.vocab_size + 5), model.names)


def kv_heads_saved_twice(model: Model) -> Iso:
    """The file of a model that has a key and value head for each of twice as many ranks."""
    return model.family.layout(attrs.evolve(model.config, num_kv_heads=2 * model.config.num_kv_heads), model.names)


def tensor_not_claimed(model: Model) -> Iso:
    return Iso(tuple(p for p in model.layout.parts if "layers.0.q_norm" not in p.target))


# -------------------------------------------------------------------------------------------- onto ranks


def _instead(model: Model, ranks: int, leaf: str, other: Iso) -> Iso:
    """The placement as it should be, but for one leaf."""
    return Iso(tuple(p for p in model.placed(ranks).parts if leaf not in p.source) + other.parts)


def bias_summed_over_ranks(model: Model, ranks: int) -> Iso:
    """Every rank holds the bias of a row-parallel matrix, and what they hold is added up when it is saved."""
    leaf = "layers.0.o_bias"
    spec = model.layout.target[leaf]
    held = [rank_name(rank, leaf) for rank in range(ranks)]

    def backward(tensors: Tensors) -> dict[str, torch.Tensor]:
        total = tensors[held[0]]
        for name in held[1:]:
            total = total + tensors[name]
        return {leaf: total}

    (right,) = replicate(leaf, held, spec).parts
    return _instead(model, ranks, leaf, Iso((attrs.evolve(right, backward=backward),)))


def kv_copies_not_compared(model: Model, ranks: int) -> Iso:
    """When ranks that hold the same key and value head are merged, the last one wins."""
    leaf = "layers.0.qkv"
    (right,) = [p for p in model.placed(ranks).parts if leaf in p.source]
    head = model.config.head_dim
    rows = model.config.num_heads * head
    each = rows // ranks
    last = rank_name(ranks - 1, leaf)

    def backward(tensors: Tensors) -> dict[str, torch.Tensor]:
        queries = [tensors[rank_name(rank, leaf)][:each] for rank in range(ranks)]
        return {leaf: torch.cat([*queries, tensors[last][each:]])}

    return _instead(model, ranks, leaf, Iso((attrs.evolve(right, backward=backward),)))


def kv_heads_dealt_in_turn(model: Model, ranks: int) -> Iso:
    """Rank r holds key and value head r modulo their number, which are not those of its query heads."""
    leaf, config = "layers.0.qkv", model.config
    whole = model.layout.target[leaf]

    def rows(count: int) -> TensorSpec:
        return TensorSpec((count * config.head_dim, *whole.shape[1:]))

    held = [rank_name(rank, leaf) for rank in range(ranks)]
    queries = {f"q/{name}": rows(config.num_heads // ranks) for name in held}
    heads = {f"{kind}{head}": rows(1) for kind in "kv" for head in range(config.num_kv_heads)}
    copies = product(
        replicate(f"{kind}{head}", [f"{kind}/{held[r]}" for r in range(head, ranks, config.num_kv_heads)], rows(1))
        for kind in "kv"
        for head in range(config.num_kv_heads)
    )
    joined = product(
        concat({f"q/{name}": queries[f"q/{name}"], f"k/{name}": rows(1), f"v/{name}": rows(1)}, name) for name in held
    )
    return _instead(model, ranks, leaf, split(leaf, {**queries, **heads}) >> (identity(queries) | copies) >> joined)


def fused_leaf_cut_as_one_block(model: Model, ranks: int) -> Iso:
    return model.placed(ranks, gate_up=Split(0))


def channels_cut_as_one_block(model: Model, ranks: int) -> Iso:
    return model.placed(ranks, conv=Split(0))


def padding_not_looked_at(model: Model, ranks: int) -> Iso:
    """Rows behind the vocabulary are dropped when it is saved, whatever was trained into them."""
    (right,) = [p for p in model.placed(ranks).parts if "embed" in p.source]
    rows = model.config.vocab_size

    def backward(tensors: Tensors) -> dict[str, torch.Tensor]:
        return {"embed": torch.cat([tensors[rank_name(rank, "embed")] for rank in range(ranks)])[:rows]}

    return _instead(model, ranks, "embed", Iso((attrs.evolve(right, backward=backward),)))


def row_parallel_matrix_cut_by_rows(model: Model, ranks: int) -> Iso:
    return model.placed(ranks, down=Split(0))
