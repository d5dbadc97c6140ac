"""What a rank holds of each leaf of each token family, as plain indices, and which numbers of ranks there can be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from parity.reference_layouts import (
    Config,
    bailing_dense,
    bailing_full,
    bailing_shared,
    gemma4_layer,
    text_of,
)

Block = tuple[int, int, bool]
"""Rows, the heads among them (0: a cut may fall anywhere), and whether ranks may hold copies of a head."""

VOCABULARY = ("embed", "head", "layer_embed")
COLUMNS = ("o", "out", "down", "shared_down")


def part(hf: Config, leaf: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What rank `rank` of `ranks` holds of a leaf; the model must be `servable` by so many."""
    layer, name = (int(leaf.split(".")[1]), leaf.split(".")[2]) if leaf.startswith("layers.") else (0, leaf)
    if name in VOCABULARY:
        each = -(-tensor.shape[0] // ranks)
        padded = torch.cat([tensor, tensor.new_zeros(each * ranks - tensor.shape[0], tensor.shape[1])])
        return padded[rank * each : (rank + 1) * each]
    blocks = rows(hf, layer).get(name)
    if blocks is None:
        return tensor
    dim = {"expert_down": 2, "expert_gate_up": 1}.get(name, 1 if name in COLUMNS else 0)
    return tensor.index_select(dim, _held(blocks, rank, ranks))


def servable(hf: Config, ranks: int) -> bool:
    """True when `ranks` ranks can share the model."""
    layers = range(text_of(hf)["num_hidden_layers"])
    return all(_divides(block, ranks) for i in layers for blocks in rows(hf, i).values() for block in blocks)


def _divides(block: Block, ranks: int) -> bool:
    size, heads, copied = block
    if not heads:
        return size % ranks == 0
    return heads % ranks == 0 or (copied and ranks % heads == 0)


def _held(blocks: Sequence[Block], rank: int, ranks: int) -> torch.Tensor:
    made, start = [], 0
    for size, heads, _ in blocks:
        if heads and heads < ranks:
            head = rank * heads // ranks
            made.append(torch.arange(size // heads) + start + head * (size // heads))
        else:
            made.append(torch.arange(size // ranks) + start + rank * (size // ranks))
        start += size
    return torch.cat(made)


def rows(hf: Config, i: int) -> dict[str, list[Block]]:
    """The leaves of layer `i` that ranks share, and the blocks of what they share."""
    c = text_of(hf)
    if c["model_type"].startswith("gemma4"):
        return _gemma4(c, i)
    if c["model_type"].startswith("bailing"):
        return _bailing(c, i)
    if "linear_num_key_heads" in c:
        return _qwen3_5(c, i)
    expert = "num_experts" in c and not (
        i in c.get("mlp_only_layers", []) or (i + 1) % c.get("decoder_sparse_step", 1) != 0
    )
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    made = _attention("qkv", c["num_attention_heads"], c["num_key_value_heads"], dim)
    made |= _pair(c["moe_intermediate_size"], "expert_") if expert else _pair(c["intermediate_size"])
    present = {"qkv_bias": c["model_type"] == "qwen2" or c.get("attention_bias"), "gate_up_bias": c.get("mlp_bias")}
    return {name: blocks for name, blocks in made.items() if present.get(name, True)}


def _attention(name: str, heads: int, kv: int, dim: int) -> dict[str, list[Block]]:
    q, k = (heads * dim, heads, False), (kv * dim, kv, True)
    blocks = [q] + [k] * (len(name) - 1)
    return {name: blocks, f"{name}_bias": blocks, "o": [q]}


def _pair(inner: int, before: str = "") -> dict[str, list[Block]]:
    block = (inner, 0, False)
    return {f"{before}gate_up": [block, block], f"{before}gate_up_bias": [block, block], f"{before}down": [block]}


def _qwen3_5(c: Config, i: int) -> dict[str, list[Block]]:
    heads = c["num_attention_heads"]
    if c["layer_types"][i] == "full_attention":
        made = _attention("qkv", heads, c["num_key_value_heads"], c["head_dim"])
        made |= {"gate": made["o"], "gate_bias": made["o"]}
    else:
        keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
        k, v = (keys * c["linear_key_head_dim"], keys, True), (values * c["linear_value_head_dim"], values, False)
        each = (values, values, False)
        made = {"qkvz": [k, k, v, v], "conv": [k, k, v], "ba": [each, each], "dt_bias": [each], "A_log": [each]}
        made["out"] = [v]
    if "num_experts" not in c:
        return made | _pair(c["intermediate_size"])
    made |= _pair(c["moe_intermediate_size"], "expert_")
    return made | _pair(c["shared_expert_intermediate_size"], "shared_")


def _gemma4(c: Config, i: int) -> dict[str, list[Block]]:
    dim, kv, own, values, inner = gemma4_layer(c, i)
    made = _attention("q" + "k" * own + "v" * values, c["num_attention_heads"], kv, dim) | _pair(inner)
    return made | _pair(c["moe_intermediate_size"], "expert_") if c.get("enable_moe_block") else made


def _bailing(c: Config, i: int) -> dict[str, list[Block]]:
    heads, dim = c["num_attention_heads"], c["head_dim"]
    wide, each = (heads * dim, heads, False), (heads, heads, False)
    if not bailing_full(c, i):
        made = {"gate": [wide], "o": [wide]}
        if "kda_safe_gate" in c:
            made |= {"qkv": [wide] * 3, "conv": [wide] * 3, "forget": [wide], "dt_bias": [wide]}
            made |= {"beta": [each], "A_log": [each]}
        else:
            kv = c.get("num_kv_heads_for_linear_attn") or heads
            fused = [wide, (kv * dim, kv, True), (kv * dim, kv, True)]
            made |= {"qkv": fused, "qkv_bias": fused, "group_norm": [wide]}
    elif "kv_lora_rank" in c:
        nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        query = [(heads * (nope + rope), heads, False)]
        made = {"q": query, "q_b": query, "kv_b": [(heads * (nope + value), heads, False)], "gate": [each]}
        made["o"] = [(heads * value, heads, False)]
    else:
        made = _attention("qkv", heads, c["num_key_value_heads"], dim)
    if bailing_dense(c, i):
        return made | _pair(c["intermediate_size"])
    made |= _pair(c["moe_intermediate_size"], "expert_")
    return made | _pair(bailing_shared(c), "shared_") if c["num_shared_experts"] else made
