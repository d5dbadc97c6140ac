"""bailing: what its layout needs of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from areno_fn.models.fields import Fields
from areno_fn.models.text_fields import TextFields

FULL, LINEAR = "full_attention", "linear_attention"


@attrs.frozen(kw_only=True)
class Latent:
    """The sizes of softmax attention through a latent.

    Attributes:
        q_rank: size of the queries' latent; 0: they are projected directly.
        kv_rank: size of the latent of keys and values.
        nope_dim, rope_dim, value_dim: channels of a head without and with rotation, and of its value.
        gated: each head's output has a gate.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    gated: bool


@attrs.frozen(kw_only=True)
class BailingShape:
    """The sizes of a hybrid of softmax and linear attention with grouped experts.

    Attributes:
        vocab_size, hidden_size, num_heads, num_kv_heads, head_dim: as in a dense decoder.
        linear_head_dim, linear_kv_heads: channels of a head of linear attention, its key and value heads.
        latent: of softmax attention; None: it is grouped-query attention.
        delta_taps: taps of the convolutions, where linear attention is a delta net; 0: it decays at fixed rates.
        layer_types: the kind of each layer's attention, `FULL` or `LINEAR`.
        dense_layers: for each layer, whether it has one dense block instead of experts.
        intermediate_size, moe_intermediate_size, shared_intermediate_size: inner sizes of a dense block, of an
            expert, and of the shared experts together; 0: there are no shared ones.
        num_experts: experts in a layer that has them.
        further_layers: layers behind the last one, which predict further tokens and are left out.
        tie_embeddings: the embedding is the output matrix as well.
        qkv_bias, qk_norm, expert_bias: which of these the model has.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    linear_head_dim: int
    linear_kv_heads: int
    latent: Latent | None
    delta_taps: int
    layer_types: tuple[str, ...]
    dense_layers: tuple[bool, ...]
    intermediate_size: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    num_experts: int
    further_layers: int
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    expert_bias: bool

    @property
    def shared(self) -> bool:
        """There are experts that every token takes."""
        return self.shared_intermediate_size > 0


def config_from_hf(hf: Mapping[str, Any]) -> BailingShape:
    """Reads a Hugging Face configuration with `model_type` bailing_moe_linear or bailing_hybrid.

    Raises:
        ModelError: a field that is missing, of another type, or that asks for what cannot be laid out.
    """
    text = TextFields(hf, "bailing", "bailing_moe_linear", "bailing_hybrid")
    fields = text.fields
    for name in ("use_bias", "attention_bias"):
        fields.expect(name, False)
    delta = _is_delta(fields, hf)
    layers, heads = fields.integer("num_hidden_layers"), text.heads()
    return BailingShape(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        **heads,
        linear_head_dim=fields.integer("linear_head_dim", default=heads["head_dim"]),
        linear_kv_heads=fields.integer("num_kv_heads_for_linear_attn", default=0, least=0) or heads["num_heads"],
        latent=_latent(fields, gated=delta),
        delta_taps=fields.integer("short_conv_kernel_size", default=4) if delta else 0,
        layer_types=_layer_types(text, layers, tail=not delta),
        **_experts(fields, layers),
        further_layers=_either(fields, "num_nextn_predict_layers", "num_mtp_layers", 0),
        tie_embeddings=text.tied(False),
        qkv_bias=fields.boolean("use_qkv_bias", default=False),
        qk_norm=fields.boolean("use_qk_norm", default=False),
        expert_bias=fields.boolean("moe_router_enable_expert_bias", default=True),
    )


def _is_delta(fields: Fields, hf: Mapping[str, Any]) -> bool:
    """Whether linear attention is a delta net: the third generation, which speaks of kda ("Kimi delta attention")."""
    older = any("V2" in name for name in fields.strings("architectures") or ())
    if older or not any(name.startswith("kda_") or name == "no_kda_lora" for name in hf):
        return False
    fields.expect("no_kda_lora", True)
    fields.expect("use_kda_lora", False)
    fields.expect("gated_attention_proj_granularity_type", "head_wise")
    return True


def _latent(fields: Fields, *, gated: bool) -> Latent | None:
    if fields.integer("kv_lora_rank", default=None) is None:
        return None
    return Latent(
        q_rank=fields.integer("q_lora_rank", default=0, least=0),
        kv_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim", default=128),
        rope_dim=fields.integer("qk_rope_head_dim", default=64),
        value_dim=fields.integer("v_head_dim", default=128),
        gated=gated,
    )


def _layer_types(text: TextFields, layers: int, *, tail: bool) -> tuple[str, ...]:
    """The kinds of layers; with `tail`, layers behind the last whole group are full as well."""
    size = text.fields.integer("layer_group_size", default=1)
    types = text.layer_types(layers, FULL, LINEAR, size)
    if not tail or text.fields.strings("layer_types") is not None:
        return types
    return tuple(FULL if i >= layers // size * size else kind for i, kind in enumerate(types))


def _experts(fields: Fields, layers: int) -> dict[str, Any]:
    experts = _either(fields, "num_experts", "num_local_experts", 0)
    first = fields.integer("first_k_dense_replace", default=0, least=0)
    kinds = fields.strings("mlp_layer_types")
    if kinds is not None and (len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}):
        raise fields.error(f"mlp_layer_types must say dense or sparse for each of {layers} layers, received {kinds}")
    dense = [i < first for i in range(layers)] if kinds is None else [kind == "dense" for kind in kinds]
    count = _either(fields, "num_shared_experts", "n_shared_experts", 0)
    used = fields.boolean("moe_router_enable_shared_expert", default=True)
    moe = fields.integer("moe_intermediate_size") if experts else 0
    shared = fields.integer("moe_shared_expert_intermediate_size", default=moe or None) if experts else 0
    return {
        "num_experts": experts,
        "dense_layers": tuple(alone or not experts for alone in dense),
        "intermediate_size": fields.integer("intermediate_size"),
        "moe_intermediate_size": moe,
        "shared_intermediate_size": count * shared if used else 0,
    }


def _either(fields: Fields, name: str, other: str, default: int) -> int:
    """A number that is called by one of two names."""
    value: int = fields.integer(name, default=fields.integer(other, default=default, least=0), least=0)
    return value
