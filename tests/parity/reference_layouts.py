"""What every leaf of every token family must hold, in plain torch, and what a rank must hold of it.

Written from the modelling code of transformers and from published files, and reading nothing but a Hugging Face
configuration: no layout, no table, no placement. `leaves` takes every tensor of a file once and refuses what is left;
`held` says which rows or columns of a leaf a rank has; `servable` says whether so many ranks can share a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Config = Mapping[str, Any]
Leaves = dict[str, torch.Tensor]


class File:
    """The tensors of a file, each to be taken once."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._left = dict(tensors)
        self.names = frozenset(tensors)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._left.pop(name)
        assert tuple(tensor.shape) == shape, f"{name} is {tuple(tensor.shape)}, the reference says {shape}"
        return tensor

    def finish(self) -> None:
        assert not self._left, f"nothing takes {sorted(self._left)}"


def leaves(hf: Config, tensors: Mapping[str, torch.Tensor]) -> Leaves:
    """The leaves of a model, by path.

    Args:
        hf: the contents of config.json.
        tensors: of the text model, by their names in the file.
    """
    file = File(tensors)
    made = _FAMILIES[hf["model_type"]](hf, file)
    file.finish()
    return made


def text_of(hf: Config) -> dict[str, Any]:
    """The configuration of the text model."""
    text = dict(hf.get("text_config", hf))
    text["tied"] = hf.get("tie_word_embeddings", text.get("tie_word_embeddings", hf["model_type"].startswith("gemma4")))
    return text


def _ends(c: Config, file: File, embed: str, norm: str) -> Leaves:
    shape = c["vocab_size"], c["hidden_size"]
    made = {"embed": file.take(embed, *shape), "norm": file.take(norm, c["hidden_size"])}
    if "lm_head.weight" in file.names:
        head = file.take("lm_head.weight", *shape)
        if c["tied"]:
            assert torch.equal(head, made["embed"])
        else:
            made["head"] = head
    return made


def _numbered(i: int, layer: Mapping[str, torch.Tensor]) -> Leaves:
    return {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}


def _swiglu(file: File, name: str, hidden: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    gate = file.take(f"{name}.gate_proj.weight", inner, hidden)
    up = file.take(f"{name}.up_proj.weight", inner, hidden)
    return torch.cat([gate, up]), file.take(f"{name}.down_proj.weight", hidden, inner)


def _dense_block(file: File, before: str, hidden: int, inner: int) -> Leaves:
    gate_up, down = _swiglu(file, f"{before}mlp", hidden, inner)
    return {"gate_up": gate_up, "down": down}


def _expert_block(file: File, before: str, hidden: int, inner: int, count: int) -> Leaves:
    made = {"router": file.take(f"{before}mlp.gate.weight", count, hidden)}
    name = f"{before}mlp.experts"
    if f"{name}.gate_up_proj" in file.names:
        made["expert_gate_up"] = file.take(f"{name}.gate_up_proj", count, 2 * inner, hidden)
        made["expert_down"] = file.take(f"{name}.down_proj", count, hidden, inner)
        return made
    made["expert_gate_up"] = torch.zeros(count, 2 * inner, hidden, dtype=torch.int64)
    made["expert_down"] = torch.zeros(count, hidden, inner, dtype=torch.int64)
    for e in range(count):
        made["expert_gate_up"][e, :inner] = file.take(f"{name}.{e}.gate_proj.weight", inner, hidden)
        made["expert_gate_up"][e, inner:] = file.take(f"{name}.{e}.up_proj.weight", inner, hidden)
        made["expert_down"][e] = file.take(f"{name}.{e}.down_proj.weight", hidden, inner)
    return made


def _grouped(file: File, before: str, hidden: int, heads: int, kv: int, dim: int) -> Leaves:
    rows = {"q": heads * dim, "k": kv * dim, "v": kv * dim}
    names = {x: f"{before}self_attn.{x}_proj" for x in "qkv"}
    made = {
        "qkv": torch.cat([file.take(f"{names[x]}.weight", rows[x], hidden) for x in "qkv"]),
        "o": file.take(f"{before}self_attn.o_proj.weight", hidden, heads * dim),
    }
    if f"{names['q']}.bias" in file.names:
        made["qkv_bias"] = torch.cat([file.take(f"{names[x]}.bias", rows[x]) for x in "qkv"])
    if f"{before}self_attn.o_proj.bias" in file.names:
        made["o_bias"] = file.take(f"{before}self_attn.o_proj.bias", hidden)
    return made


def _two_norms(file: File, before: str, hidden: int) -> Leaves:
    return {
        "attn_norm": file.take(f"{before}input_layernorm.weight", hidden),
        "mlp_norm": file.take(f"{before}post_attention_layernorm.weight", hidden),
    }


def _llama(hf: Config, file: File) -> Leaves:
    c = text_of(hf)
    hidden, heads, inner = c["hidden_size"], c["num_attention_heads"], c.get("intermediate_size", 0)
    dim = c.get("head_dim") or hidden // heads
    made = _ends(c, file, "model.embed_tokens.weight", "model.norm.weight")
    for i in range(c["num_hidden_layers"]):
        before = f"model.layers.{i}."
        layer = _two_norms(file, before, hidden)
        layer |= _grouped(file, before, hidden, heads, c["num_key_value_heads"], dim)
        if c["model_type"].startswith("qwen3"):
            layer |= {f"{x}_norm": file.take(f"{before}self_attn.{x}_norm.weight", dim) for x in "qk"}
        if _dense_layer(c, i):
            layer |= _dense_block(file, before, hidden, inner)
        else:
            layer |= _expert_block(file, before, hidden, c["moe_intermediate_size"], c["num_experts"])
        if c.get("mlp_bias"):
            sizes = [file.take(f"{before}mlp.{x}_proj.bias", inner) for x in ("gate", "up")]
            layer |= {"gate_up_bias": torch.cat(sizes), "down_bias": file.take(f"{before}mlp.down_proj.bias", hidden)}
        made |= _numbered(i, layer)
    _require_biases(c, made)
    return made


def _dense_layer(c: Config, i: int) -> bool:
    if "num_experts" not in c:
        return True
    return i in c.get("mlp_only_layers", []) or (i + 1) % c.get("decoder_sparse_step", 1) != 0


def _require_biases(c: Config, made: Leaves) -> None:
    """Biases were taken where the file has them; here they must be where the configuration says."""
    wanted = c["model_type"] == "qwen2" or bool(c.get("attention_bias"))
    assert ("layers.0.qkv_bias" in made) == wanted
    assert ("layers.0.o_bias" in made) == (wanted and c["model_type"] != "qwen2")


def _prefix(file: File) -> str:
    nested = "model.language_model.embed_tokens.weight" in file.names
    return "model.language_model." if nested else "model."


def _qwen3_5(hf: Config, file: File) -> Leaves:
    c, prefix = text_of(hf), _prefix(file)
    hidden = c["hidden_size"]
    made = _ends(c, file, f"{prefix}embed_tokens.weight", f"{prefix}norm.weight")
    for i, kind in enumerate(c["layer_types"]):
        before = f"{prefix}layers.{i}."
        layer = _two_norms(file, before, hidden)
        layer |= (_gated_attention if kind == "full_attention" else _delta_net)(c, file, before)
        if "num_experts" in c:
            layer |= _expert_block(file, before, hidden, c["moe_intermediate_size"], c["num_experts"])
            shared = c["shared_expert_intermediate_size"]
            layer["shared_gate_up"], layer["shared_down"] = _swiglu(file, f"{before}mlp.shared_expert", hidden, shared)
            layer["shared_gate"] = file.take(f"{before}mlp.shared_expert_gate.weight", 1, hidden)
        else:
            layer |= _dense_block(file, before, hidden, c["intermediate_size"])
        made |= _numbered(i, layer)
    return made


def _gated_attention(c: Config, file: File, before: str) -> Leaves:
    hidden, heads, kv, dim = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    attn = f"{before}self_attn."
    made = {
        "o": file.take(f"{attn}o_proj.weight", hidden, heads * dim),
        "q_norm": file.take(f"{attn}q_norm.weight", dim),
        "k_norm": file.take(f"{attn}k_norm.weight", dim),
    }
    for kind, name, columns in (("weight", "", [hidden]), ("bias", "_bias", [])):
        if kind == "bias" and not c.get("attention_bias"):
            continue
        # for each head the file has its query rows and then its gate rows
        by_head = file.take(f"{attn}q_proj.{kind}", 2 * heads * dim, *columns).view(heads, 2, dim, *columns)
        query = torch.cat([by_head[h, 0] for h in range(heads)])
        key, value = (file.take(f"{attn}{x}_proj.{kind}", kv * dim, *columns) for x in "kv")
        made[f"qkv{name}"] = torch.cat([query, key, value])
        made[f"gate{name}"] = torch.cat([by_head[h, 1] for h in range(heads)])
    if c.get("attention_bias"):
        made["o_bias"] = file.take(f"{attn}o_proj.bias", hidden)
    return made


def _delta_net(c: Config, file: File, before: str) -> Leaves:
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]
    width, attn = c.get("linear_conv_kernel_dim", 4), f"{before}linear_attn."
    qkv = file.take(f"{attn}in_proj_qkv.weight", 2 * keys + values, hidden)
    z = file.take(f"{attn}in_proj_z.weight", values, hidden)
    b, a = (file.take(f"{attn}in_proj_{x}.weight", heads, hidden) for x in "ba")
    return {
        "qkvz": torch.cat([qkv, z]),
        "ba": torch.cat([b, a]),
        "conv": file.take(f"{attn}conv1d.weight", 2 * keys + values, 1, width)[:, 0],
        "dt_bias": file.take(f"{attn}dt_bias", heads),
        "A_log": file.take(f"{attn}A_log", heads),
        "gdn_norm": file.take(f"{attn}norm.weight", c["linear_value_head_dim"]),
        "out": file.take(f"{attn}out_proj.weight", hidden, values),
    }


def gemma4_layer(c: Config, i: int) -> tuple[int, int, bool, bool, int]:
    """`head_dim`, key heads, whether there are keys, whether there are values, and the inner size of a layer."""
    count = c["num_hidden_layers"]
    full = c["layer_types"][i] == "full_attention" or i == count - 1
    own = i < count - c.get("num_kv_shared_layers", 0)
    same = c.get("attention_k_eq_v", False) and full
    dim = c["global_head_dim"] if full else c["head_dim"]
    kv = (same and c.get("num_global_key_value_heads")) or c["num_key_value_heads"]
    wide = c.get("use_double_wide_mlp", False) and not own
    return dim, kv, own, own and not same, c["intermediate_size"] * (2 if wide else 1)


def _gemma4(hf: Config, file: File) -> Leaves:
    c, prefix = text_of(hf), _prefix(file)
    hidden, count, ple = c["hidden_size"], c["num_hidden_layers"], c["hidden_size_per_layer_input"]
    made = _ends(c, file, f"{prefix}embed_tokens.weight", f"{prefix}norm.weight")
    if ple:
        vocab = c["vocab_size_per_layer_input"]
        made["layer_embed"] = file.take(f"{prefix}embed_tokens_per_layer.weight", vocab, count * ple)
        made["layer_inputs"] = file.take(f"{prefix}per_layer_model_projection.weight", count * ple, hidden)
        made["layer_norm"] = file.take(f"{prefix}per_layer_projection_norm.weight", ple)
    for i in range(count):
        before = f"{prefix}layers.{i}."
        layer = _gemma4_attention(c, file, before, i) | _dense_block(file, before, hidden, gemma4_layer(c, i)[4])
        layer["scalar"] = file.take(f"{before}layer_scalar", 1)
        norms = {
            "attn_norm": "input_layernorm",
            "attn_out_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        }
        if ple:
            norms["input_norm"] = "post_per_layer_input_norm"
            layer["input_gate"] = file.take(f"{before}per_layer_input_gate.weight", ple, hidden)
            layer["input_out"] = file.take(f"{before}per_layer_projection.weight", hidden, ple)
        if c.get("enable_moe_block"):
            experts, inner = c["num_experts"], c["moe_intermediate_size"]
            norms |= {
                "dense_out_norm": "post_feedforward_layernorm_1",
                "expert_norm": "pre_feedforward_layernorm_2",
                "expert_out_norm": "post_feedforward_layernorm_2",
            }
            layer["router"] = file.take(f"{before}router.proj.weight", experts, hidden)
            layer["router_scale"] = file.take(f"{before}router.scale", hidden)
            layer["expert_scale"] = file.take(f"{before}router.per_expert_scale", experts)
            layer["expert_gate_up"] = file.take(f"{before}experts.gate_up_proj", experts, 2 * inner, hidden)
            layer["expert_down"] = file.take(f"{before}experts.down_proj", experts, hidden, inner)
        layer |= {leaf: file.take(f"{before}{name}.weight", hidden) for leaf, name in norms.items()}
        made |= _numbered(i, layer)
    return made


def _gemma4_attention(c: Config, file: File, before: str, i: int) -> Leaves:
    dim, kv, own, values, _ = gemma4_layer(c, i)
    hidden, heads, attn = c["hidden_size"], c["num_attention_heads"], f"{before}self_attn."
    names = "q" + "k" * own + "v" * values
    made = {
        "o": file.take(f"{attn}o_proj.weight", hidden, heads * dim),
        "q_norm": file.take(f"{attn}q_norm.weight", dim),
    }
    rows = {"q": heads * dim, "k": kv * dim, "v": kv * dim}
    made[names] = torch.cat([file.take(f"{attn}{x}_proj.weight", rows[x], hidden) for x in names])
    if own:
        made["k_norm"] = file.take(f"{attn}k_norm.weight", dim)
    if c.get("attention_bias"):
        made[f"{names}_bias"] = torch.cat([file.take(f"{attn}{x}_proj.bias", rows[x]) for x in names])
        made["o_bias"] = file.take(f"{attn}o_proj.bias", hidden)
    return made


def bailing_full(c: Config, i: int) -> bool:
    """Whether a layer has softmax attention: the last of each group and, without a delta net, what no group holds."""
    size, count = c["layer_group_size"], c["num_hidden_layers"]
    return (i + 1) % size == 0 or ("kda_safe_gate" not in c and i >= count // size * size)


def bailing_dense(c: Config, i: int) -> bool:
    """Whether a layer has one dense block."""
    return i < c["first_k_dense_replace"] or not c["num_experts"]


def bailing_shared(c: Config) -> int:
    """The inner size of the shared experts together."""
    return c["num_shared_experts"] * c.get("moe_shared_expert_intermediate_size", c["moe_intermediate_size"])


def _bailing(hf: Config, file: File) -> Leaves:
    c, hidden = text_of(hf), hf["hidden_size"]
    own_words = "model.word_embeddings.weight" in file.names
    attn, dense = ("attention", "dense") if own_words else ("self_attn", "o_proj")
    embed = "word_embeddings" if own_words else "embed_tokens"
    made = _ends(c, file, f"model.{embed}.weight", "model.norm.weight")
    for i in range(c["num_hidden_layers"]):
        before = f"model.layers.{i}."
        layer = _two_norms(file, before, hidden)
        if not bailing_full(c, i):
            kind = _channel_delta if "kda_safe_gate" in c else _decay
        else:
            kind = _latent if "kv_lora_rank" in c else _softmax
        layer |= kind(c, file, f"{before}{attn}.", dense)
        if bailing_dense(c, i):
            layer |= _dense_block(file, before, hidden, c["intermediate_size"])
        else:
            layer |= _expert_block(file, before, hidden, c["moe_intermediate_size"], c["num_experts"])
            if c.get("moe_router_enable_expert_bias", True):
                bias = "expert_bias" if own_words else "e_score_correction_bias"
                layer["expert_bias"] = file.take(f"{before}mlp.gate.{bias}", c["num_experts"])
            if c["num_shared_experts"]:
                name = f"{before}mlp.shared_experts"
                layer["shared_gate_up"], layer["shared_down"] = _swiglu(file, name, hidden, bailing_shared(c))
        made |= _numbered(i, layer)
    return made


def _fused(c: Config, file: File, attn: str, rows: int, dim: int) -> Leaves:
    made = {"qkv": file.take(f"{attn}query_key_value.weight", rows, c["hidden_size"])}
    if c.get("use_qkv_bias"):
        made["qkv_bias"] = file.take(f"{attn}query_key_value.bias", rows)
    if c.get("use_qk_norm"):
        made["q_norm"] = file.take(f"{attn}query_layernorm.weight", dim)
        made["k_norm"] = file.take(f"{attn}key_layernorm.weight", dim)
    return made


def _softmax(c: Config, file: File, attn: str, dense: str) -> Leaves:
    heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    made = _fused(c, file, attn, (heads + 2 * kv) * dim, dim)
    return made | {"o": file.take(f"{attn}{dense}.weight", c["hidden_size"], heads * dim)}


def _decay(c: Config, file: File, attn: str, dense: str) -> Leaves:
    heads, dim, hidden = c["num_attention_heads"], c["head_dim"], c["hidden_size"]
    kv = c.get("num_kv_heads_for_linear_attn") or heads
    made = _fused(c, file, attn, (heads + 2 * kv) * dim, dim)
    return made | {
        "gate": file.take(f"{attn}g_proj.weight", heads * dim, hidden),
        "group_norm": file.take(f"{attn}g_norm.weight", heads * dim),
        "o": file.take(f"{attn}{dense}.weight", hidden, heads * dim),
    }


def _channel_delta(c: Config, file: File, attn: str, dense: str) -> Leaves:
    heads, dim, hidden, width = c["num_attention_heads"], c["head_dim"], c["hidden_size"], c["short_conv_kernel_size"]
    rows = heads * dim
    return {
        "qkv": torch.cat([file.take(f"{attn}{x}_proj.weight", rows, hidden) for x in "qkv"]),
        "conv": torch.cat([file.take(f"{attn}{x}_conv1d.weight", rows, 1, width).squeeze(1) for x in "qkv"]),
        "forget": file.take(f"{attn}f_proj.weight", rows, hidden),
        "beta": file.take(f"{attn}b_proj.weight", heads, hidden),
        "dt_bias": file.take(f"{attn}dt_bias", rows),
        "A_log": file.take(f"{attn}A_log", heads),
        "gate": file.take(f"{attn}g_proj.weight", rows, hidden),
        "o_norm": file.take(f"{attn}o_norm.weight", dim),
        "o": file.take(f"{attn}{dense}.weight", hidden, rows),
    }


def _latent(c: Config, file: File, attn: str, dense: str) -> Leaves:
    heads, hidden, rank = c["num_attention_heads"], c["hidden_size"], c["kv_lora_rank"]
    nope, rope, value, q_rank = (
        c.get(x) for x in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
    )
    made = {
        "kv_a": file.take(f"{attn}kv_a_proj_with_mqa.weight", rank + rope, hidden),
        "kv_a_norm": file.take(f"{attn}kv_a_layernorm.weight", rank),
        "kv_b": file.take(f"{attn}kv_b_proj.weight", heads * (nope + value), rank),
        "o": file.take(f"{attn}{dense}.weight", hidden, heads * value),
    }
    if q_rank:
        made["q_a"] = file.take(f"{attn}q_a_proj.weight", q_rank, hidden)
        made["q_a_norm"] = file.take(f"{attn}q_a_layernorm.weight", q_rank)
        made["q_b"] = file.take(f"{attn}q_b_proj.weight", heads * (nope + rope), q_rank)
    else:
        made["q"] = file.take(f"{attn}q_proj.weight", heads * (nope + rope), hidden)
    if "kda_safe_gate" in c:
        made["gate"] = file.take(f"{attn}g_proj.weight", heads, hidden)
    return made


_FAMILIES = {
    "llama": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "qwen3_moe": _llama,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
    "minicpmv4_6": _qwen3_5,
    "gemma4": _gemma4,
    "gemma4_text": _gemma4,
    "bailing_moe_linear": _bailing,
    "bailing_hybrid": _bailing,
}
