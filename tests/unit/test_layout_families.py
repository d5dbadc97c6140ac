"""The layouts of the token families: what they refuse, what they leave out, and rows worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from areno_fn.ckpt.folder import open_folder
from areno_fn.ckpt.load import load, require_fit
from areno_fn.ckpt.save import save
from areno_fn.contracts.errors import CheckpointError, LayoutError, ModelError
from areno_fn.contracts.layout import Iso, TensorSpec
from areno_fn.contracts.placement import Fused, Replicated, Split, Vocabulary, grouped, place, rank_name
from areno_fn.models import FAMILIES
from areno_fn.models.layouts import FAMILY_LAYOUTS, LAYOUTS, TokenLayout, layout_of
from areno_fn.models.table import HEAD, Section, Table, experts, prefix, row, word
from areno_fn.testing.checkpoints import state_dict
from areno_fn.testing.plain_files import write_folder


def changed(kind: str, variant: str, **fields: Any) -> dict[str, Any]:
    """A tiny configuration with other fields in its text part; None removes one."""
    hf = dict(LAYOUTS[kind].variants[variant])
    text = {**hf.get("text_config", hf), **fields}
    text = {name: value for name, value in text.items() if value is not None}
    return {**hf, "text_config": text} if "text_config" in hf else text


def built(hf: Mapping[str, Any], names: frozenset[str] | None = None) -> Iso:
    """The layout of a configuration."""
    family = layout_of(hf)
    return family.layout(family.config_from_hf(hf), names)


def numbers(iso: Iso) -> dict[str, torch.Tensor]:
    """Every element of a file is another number."""
    made, start = {}, 0
    for name, spec in iso.source.items():
        made[name] = torch.arange(start, start + spec.numel).reshape(spec.shape)
        start += spec.numel
    return made


# ---------------------------------------------------------------------------------------------------- the registry


def test_every_family_has_its_own_types_and_variants_of_them() -> None:
    kinds = [kind for family in FAMILY_LAYOUTS for kind in family.model_types]
    assert len(set(kinds)) == len(kinds) == len(LAYOUTS)
    assert {family.name for family in FAMILY_LAYOUTS} >= set(FAMILIES)
    for family in FAMILY_LAYOUTS:
        assert {hf["model_type"] for hf in family.variants.values()} == set(family.model_types)


@pytest.mark.parametrize("family", FAMILY_LAYOUTS, ids=lambda family: family.name)
def test_every_form_is_claimed_whole_and_every_leaf_is_placed(family: TokenLayout) -> None:
    for hf in family.variants.values():
        config = family.config_from_hf(hf)
        for form in family.forms(config):
            iso = family.layout(config, form)
            assert set(iso.source) == form
            assert family.placements(config, form).keys() == iso.target.keys()
        assert family.forms(config)[0] == set(family.layout(config).source)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_dense_families_are_laid_out_as_their_models_are(name: str) -> None:
    family = FAMILIES[name]
    for hf in LAYOUTS[name].variants.values():
        config = family.config_from_hf(hf)
        for form in LAYOUTS[name].forms(config):
            ours = LAYOUTS[name].layout(config, form)
            theirs = family.layout(config, head_in_file=HEAD in form)
            assert (ours.source, ours.target) == (theirs.source, theirs.target)


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match="model_type is 'mamba', but the layouts known here are those of llama, qwen2"):
        layout_of({"model_type": "mamba"})
    with pytest.raises(ModelError, match="model_type is None"):
        layout_of({})


# ------------------------------------------------------------------------------------------------ rows by hand


def test_N7_query_and_gate_rows_are_dealt_by_head_and_interleaved_again() -> None:
    hf = changed("qwen3_5", "text", num_attention_heads=2, num_key_value_heads=1, head_dim=2, hidden_size=1)
    hf |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    iso = built(hf)
    file = {name: torch.full(spec.shape, -1) for name, spec in iso.source.items()}
    name = "model.layers.0.self_attn.q_proj.weight"
    file[name] = torch.arange(8)[:, None]
    leaves = iso(file)
    assert leaves["layers.0.qkv"][:4, 0].tolist() == [0, 1, 4, 5]
    assert leaves["layers.0.gate"][:, 0].tolist() == [2, 3, 6, 7]
    assert iso.inverse(leaves)[name][:, 0].tolist() == list(range(8))


def _four_kv_heads() -> tuple[Iso, Iso]:
    hf = changed("llama", "untied", num_attention_heads=8, num_key_value_heads=4, head_dim=128, num_hidden_layers=1)
    family, whole = LAYOUTS["llama"], built(hf)
    return whole, place(whole.target, family.placements(family.config_from_hf(hf)), 8)


def test_N6_four_kv_heads_on_eight_ranks_are_held_by_pairs_and_saved_once() -> None:
    whole, placed = _four_kv_heads()
    file = numbers(whole)
    held = placed(whole(file))
    keys = file["model.layers.0.self_attn.k_proj.weight"]
    values = file["model.layers.0.self_attn.v_proj.weight"]
    for rank in range(8):
        qkv = held[rank_name(rank, "layers.0.qkv")]
        head = slice(rank // 2 * 128, rank // 2 * 128 + 128)
        assert torch.equal(qkv[128:256], keys[head])
        assert torch.equal(qkv[256:], values[head])
    assert all(torch.equal(tensor, file[name]) for name, tensor in (whole >> placed).inverse(held).items())


def test_N6_copies_of_a_kv_head_that_differ_are_not_saved() -> None:
    whole, placed = _four_kv_heads()
    held = placed(whole(numbers(whole)))
    held[rank_name(3, "layers.0.qkv")][200] += 1
    with pytest.raises(LayoutError, match="are tied, .* but their values differ"):
        placed.inverse(held)


@pytest.mark.parametrize(("kv", "heads", "ranks"), [(4, 12, 3), (3, 12, 2), (1, 6, 4), (2, 4, 8)])
def test_N6_heads_that_ranks_cannot_share_are_refused_before_anything_is_read(kv: int, heads: int, ranks: int) -> None:
    hf = changed("llama", "untied", num_attention_heads=heads, num_key_value_heads=kv, intermediate_size=24)
    family = LAYOUTS["llama"]
    with pytest.raises(LayoutError, match=rf"'layers.0.qkv': \d+ heads cannot be dealt to {ranks} ranks"):
        place(built(hf).target, family.placements(family.config_from_hf(hf)), ranks)


def test_gemma4_keys_that_serve_as_values_are_one_leaf_in_one_tensor() -> None:
    iso = built(LAYOUTS["gemma4"].variants["keys as values"])
    assert iso.sources_of("layers.1.qk") == (
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
    )
    assert not any("layers.1.self_attn.v_proj" in name for name in iso.source)
    assert iso.sources_of("layers.0.qkv")[-1] == "model.layers.0.self_attn.v_proj.weight"


def test_experts_are_stacks_of_gate_over_up_from_either_form() -> None:
    family = LAYOUTS["qwen3_5_moe"]
    config = family.config_from_hf(family.variants["text"])
    single, packed = (form for form in family.forms(config) if HEAD in form and "model.embed_tokens.weight" in form)
    file = numbers(family.layout(config, single))
    leaf = family.layout(config, single)(file)["layers.0.expert_gate_up"]
    for e in range(3):
        gate, up = (file[f"model.layers.0.mlp.experts.{e}.{kind}_proj.weight"] for kind in ("gate", "up"))
        assert torch.equal(leaf[e], torch.cat([gate, up]))
    whole = family.layout(config, packed)
    assert whole.sources_of("layers.0.expert_gate_up") == ("model.layers.0.mlp.experts.gate_up_proj",)
    assert whole.target == family.layout(config, single).target


def test_placements_of_a_hybrid_name_every_kind() -> None:
    family = LAYOUTS["qwen3_5_moe"]
    placed = family.placements(family.config_from_hf(family.variants["text"]))
    assert placed["embed"] == placed["head"] == Vocabulary(0)
    assert placed["layers.1.qkv"] == grouped(4, 2, 8)
    assert placed["layers.0.router"] == placed["layers.0.gdn_norm"] == Replicated()
    assert placed["layers.0.expert_down"] == Split(2)
    conv, expert = placed["layers.0.conv"], placed["layers.0.expert_gate_up"]
    assert isinstance(conv, Fused)
    assert [(block.size, block.heads, block.copied) for block in conv.blocks] == [
        (10, 2, True), (10, 2, True), (12, 4, False),
    ]  # fmt: skip
    assert isinstance(expert, Fused)
    assert (expert.dim, [block.size for block in expert.blocks]) == (1, [8, 8])


def test_whole_experts_are_dealt_to_ranks() -> None:
    family = LAYOUTS["bailing_hybrid"]
    config = family.config_from_hf(family.variants["latent"])
    iso, placements = family.layout(config), family.placements(config, whole_experts=True)
    leaves = iso(numbers(iso))
    held = place(iso.target, placements, 2)(leaves)
    for name in ("layers.1.expert_gate_up", "layers.1.expert_down"):
        for rank in range(2):
            assert torch.equal(held[rank_name(rank, name)], leaves[name][2 * rank : 2 * rank + 2])
    shared = {name for name, placement in family.placements(config).items() if placement != placements[name]}
    assert shared == {f"layers.{i}.expert_{kind}" for i in (1, 2, 3) for kind in ("gate_up", "down")}


LLAMA_3_2_1B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
QWEN_2_5_05B = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
QWEN_3_30B_A3B = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("hf", "tensors", "parameters"),
    [
        (LLAMA_3_2_1B, 146, 1_235_814_400),
        (QWEN_2_5_05B, 290, 494_032_768),
        (QWEN_3_30B_A3B, 18_867, 30_532_122_624),
    ],
    ids=["Llama-3.2-1B", "Qwen2.5-0.5B", "Qwen3-30B-A3B"],
)
def test_published_models_have_as_many_tensors_and_parameters(
    hf: dict[str, Any], tensors: int, parameters: int
) -> None:
    iso = built(hf)
    assert len(iso.source) == tensors
    assert sum(spec.numel for spec in iso.source.values()) == parameters
    assert sum(spec.numel for spec in iso.target.values()) == parameters


# ------------------------------------------------------------------------------------------------- forms of files


def test_the_prefix_follows_the_file_and_not_the_configuration() -> None:
    family = LAYOUTS["qwen3_5"]
    flat, nested = (family.config_from_hf(family.variants[name]) for name in ("text", "whole"))
    for config in (flat, nested):
        for before in ("model.", "model.language_model."):
            iso = family.layout(config, {f"{before}embed_tokens.weight"})
            assert f"{before}norm.weight" in iso.source
    assert "model.language_model.norm.weight" in family.layout(nested).source
    assert "model.norm.weight" in family.layout(flat).source


def test_K6_two_tensors_for_one_embedding_are_refused_by_name() -> None:
    family = LAYOUTS["qwen3_5"]
    names = {"model.embed_tokens.weight", "model.language_model.embed_tokens.weight"}
    with pytest.raises(LayoutError) as refused:
        family.layout(family.config_from_hf(family.variants["text"]), names)
    assert all(repr(name) in str(refused.value) for name in names)
    with pytest.raises(LayoutError, match="no tensor 'model.word_embeddings.weight' or 'model.embed_tokens.weight'"):
        built(LAYOUTS["bailing_hybrid"].variants["latent"], frozenset({"wte.weight"}))


def test_K6_experts_in_both_forms_are_refused_by_name(tmp_path: Any) -> None:
    hf = LAYOUTS["qwen3_moe"].variants["tied"]
    iso = built(hf)
    state = state_dict(iso) | {"model.layers.2.mlp.experts.gate_up_proj": torch.zeros(3, 16, 16)}
    folder = open_folder(write_folder(tmp_path / "both", state, hf, metadata={"format": "pt"}, index={}))
    with pytest.raises(CheckpointError) as refused:
        require_fit(folder, built(hf, frozenset(folder.specs)))
    for name in ("gate_proj", "up_proj"):
        assert all(
            f"'model.layers.2.mlp.experts.{e}.{name}.weight' is not declared" in str(refused.value) for e in range(3)
        )


def test_K6_two_leaves_of_one_name_are_refused() -> None:
    twice = Section("model.", "", (row("norm", "", "", "a size"), row("norm", "", "", "b size")), {"size": 2})
    table = Table((twice,), "model.embed_tokens.weight", (3, 2), (), tied=True)
    with pytest.raises(LayoutError, match="the target key 'norm' is claimed by two parts"):
        table.layout  # noqa: B018


def test_a_tied_head_in_the_file_is_one_leaf_written_twice(tmp_path: Any) -> None:
    for kind, variant in (("gemma4", "dense"), ("qwen3_moe", "tied"), ("minicpmv4_6", "tied")):
        hf = LAYOUTS[kind].variants[variant]
        written = built(hf)
        assert HEAD not in written.source
        both = built(hf, frozenset(written.source) | {HEAD})
        assert len(both.sources_of("embed")) == 2
        assert both.target == written.target
        state = state_dict(both)
        folder = open_folder(write_folder(tmp_path / kind, state, hf, metadata={"format": "pt"}, index={}))
        save(tmp_path / "saved", load(folder, both), both, hf, source=folder)
        again = open_folder(tmp_path / "saved")
        assert set(again.specs) == set(state)
        state[HEAD] = state[HEAD].clone()
        state[HEAD].view(torch.uint8)[0, 0] ^= 1
        folder = open_folder(write_folder(tmp_path / f"{kind}2", state, hf, metadata={"format": "pt"}, index={}))
        with pytest.raises(LayoutError, match="'lm_head.weight' are tied"):
            load(folder, both)


# ---------------------------------------------------------------------------------------------------- left out


@pytest.mark.parametrize(
    ("kind", "variant", "others"),
    [
        ("qwen3_5", "whole", ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight", "mtp.layers.0.mlp.down_proj.weight")),
        ("minicpmv4_6", "untied", ("model.vision_tower.post_layernorm.bias", "model.merger.mlp.0.linear_1.weight")),
        ("gemma4", "whole", (
            "model.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight", "model.embed_vision.embedding_projection.weight",
            "model.audio_tower.output_proj.bias", "model.language_model.layers.2.self_attn.k_proj.weight",
            "model.language_model.layers.3.self_attn.v_proj.weight", "model.language_model.layers.3.self_attn.k_norm.weight",
        )),
        ("bailing_hybrid", "latent", ("model.layers.4.eh_proj.weight", "model.layers.4.attention.dense.weight")),
    ],
)  # fmt: skip
def test_what_is_no_part_of_the_text_model_is_left_out(kind: str, variant: str, others: tuple[str, ...]) -> None:
    family = LAYOUTS[kind]
    config = family.config_from_hf(family.variants[variant])
    own = tuple(family.layout(config).source)
    assert family.kept(config, (*own, *others)) == own


def test_keys_of_layers_that_have_them_are_not_left_out() -> None:
    family = LAYOUTS["gemma4"]
    config = family.config_from_hf(family.variants["inputs per layer, shared keys"])
    names = [f"model.layers.{i}.self_attn.k_proj.weight" for i in (0, 1, 2, 3, 12)]
    assert family.kept(config, names) == tuple(names[:2] + names[4:])


# ------------------------------------------------------------------------------------------------- configurations

REFUSED = {
    "another model": ("qwen3_moe", "tied", {"model_type": "qwen2_moe"}, "model_type is 'qwen2_moe', which is not supported"),
    "quantised": ("gemma4", "dense", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
    "no size": ("qwen3_5", "text", {"hidden_size": None}, "hidden_size is missing"),
    "text for a size": ("gemma4", "whole", {"hidden_size": "16"}, "text_config of a gemma4 configuration: hidden_size must be"),
    "odd heads": ("qwen3_moe", "tied", {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
    "no channels": ("llama", "tied", {"head_dim": None, "hidden_size": 15}, "hidden_size 15 is not a multiple"),
    "no channels (experts)": ("qwen3_moe", "tied", {"head_dim": None, "hidden_size": 15}, "hidden_size 15 is not a multiple"),
    "too few kinds": ("qwen3_5", "text", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    "a kind of its own": ("qwen3_5", "whole", {"layer_types": ["mamba", "full_attention"]}, r"layer_types\[0\] is 'mamba'"),
    "odd value heads": ("qwen3_5", "text", {"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple"),
    "no expert size": ("gemma4", "experts", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    "too many shared": ("gemma4", "dense", {"num_kv_shared_layers": 5}, "num_kv_shared_layers exceeds num_hidden_layers"),
    "a layer that is not": ("gemma4", "dense", {"per_layer_config": {"7": {}}}, "an entry for layer '7', which does not exist"),
    "a field of a layer": ("gemma4", "dense", {"per_layer_config": {"1": {"mlp": 3}}}, "the field 'mlp' is unknown"),
    "odd heads of a layer": ("gemma4", "keys as values", {"num_global_key_value_heads": 3}, "the 3 key heads of layer 1"),
    "biases": ("bailing_hybrid", "latent", {"use_bias": True}, "use_bias is True, which is not supported"),
    "latent gates": ("bailing_hybrid", "delta", {"no_kda_lora": False}, "no_kda_lora is False"),
    "kinds of blocks": ("bailing_hybrid", "delta", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must say dense or sparse"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "variant", "fields", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_laid_out_is_refused_by_name(kind: str, variant: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        LAYOUTS[kind].config_from_hf(changed(kind, variant, **fields))


def test_a_model_of_pictures_without_text_is_refused() -> None:
    with pytest.raises(ModelError, match="text_config is missing"):
        LAYOUTS["minicpmv4_6"].config_from_hf({"model_type": "minicpmv4_6", "vision_config": {}})


def test_the_whole_model_says_whether_the_head_is_tied() -> None:
    hf = LAYOUTS["qwen3_5"].variants["whole"]
    for outer, inner, tied in ((True, False, True), (False, True, False), (None, True, True), (None, None, False)):
        text = {**hf["text_config"], "tie_word_embeddings": inner}
        config = LAYOUTS["qwen3_5"].config_from_hf({**hf, "text_config": text, "tie_word_embeddings": outer})
        assert config.tie_embeddings is tied


def test_layers_without_a_list_are_full_at_the_end_of_each_group() -> None:
    hf = changed("qwen3_5", "text", layer_types=None, num_hidden_layers=5, full_attention_interval=2)
    kinds = LAYOUTS["qwen3_5"].config_from_hf(hf).layer_types
    assert [kind == "full_attention" for kind in kinds] == [False, True, False, True, False]
    hf = changed("gemma4", "dense", layer_types=None, num_hidden_layers=8)
    dims = [layer.head_dim for layer in LAYOUTS["gemma4"].config_from_hf(hf).layers]
    assert dims == [4, 4, 4, 4, 4, 8, 4, 8]  # the last layer is full, whatever the pattern says


def test_a_published_and_a_written_configuration_of_gemma4_say_the_same() -> None:
    published = changed("gemma4", "keys as values")
    written = {name: value for name, value in published.items() if "global" not in name}
    override = {"head_dim": 8, "num_key_value_heads": 1}
    written["per_layer_config"] = {"1": override, "3": override}
    family = LAYOUTS["gemma4"]
    assert family.config_from_hf(published) == family.config_from_hf(written)


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({"num_hidden_layers": 5, "layer_group_size": 2}, [False, True, False, True, True]),
        ({"num_hidden_layers": 5, "layer_group_size": 3}, [False, False, True, True, True]),
        ({"num_hidden_layers": 3, "layer_group_size": 5}, [True, True, True]),
    ],
)
def test_bailing_layers_behind_the_last_group_are_full(fields: dict[str, Any], full: list[bool]) -> None:
    config = LAYOUTS["bailing_moe_linear"].config_from_hf(changed("bailing_moe_linear", "grouped", **fields))
    assert [kind == "full_attention" for kind in config.layer_types] == full


def test_bailing_of_the_second_generation_is_known_by_its_architecture() -> None:
    fields = {"architectures": ["BailingMoeV2_5ForCausalLM"], "no_kda_lora": False}
    config = LAYOUTS["bailing_hybrid"].config_from_hf(changed("bailing_hybrid", "latent", **fields))
    assert (config.delta_taps, config.further_layers) == (0, 1)


# ------------------------------------------------------------------------------------------------------ the table


def test_a_table_with_a_place_that_is_none_is_refused() -> None:
    section = Section("", "", (row("o", "rows", "size", "o size"),), {"size": 2})
    with pytest.raises(LayoutError, match="the row of 'o' has the place 'rows'; it can be column, row, vocab or empty"):
        section.placements()


def test_a_row_with_a_tensor_twice_or_a_size_that_is_none_is_refused() -> None:
    twice = Section("", "", (row("x", "column", "", "a size", "a size"),), {"size": 2})
    with pytest.raises(LayoutError, match="the row of 'x' names a tensor twice: a, a"):
        twice.layout(())
    unknown = Section("", "", (row("x", "column", "width", "a size"),), {"size": 2})
    with pytest.raises(LayoutError, match="a row names the size 'width', but the sizes are 'size'"):
        unknown.layout(())


def test_a_part_of_a_row_without_rows_and_experts_without_a_number_are_refused() -> None:
    words = "a part of a row is a tensor's name and its rows, such as 'norm.weight hidden', not 'norm.weight'"
    with pytest.raises(LayoutError, match=words):
        row("norm", "", "", "norm.weight")
    with pytest.raises(LayoutError, match="the row of 'up' is of experts, so the name 'up.weight' needs an {e}"):
        experts("up", "column", "size", "up.weight size", packed="up")


def test_a_word_is_one_between_dots_and_the_first_choice_without_one() -> None:
    assert word(["model.layers.0.self_attn.dense.weight"], "attention", "self_attn") == "self_attn"
    assert word(["model.attention_norm.weight"], "attention", "self_attn") == "attention"
    assert prefix(["b.x"], "x", ("a.", "b.")) == "b."


def test_sections_read_sizes_with_and_without_heads() -> None:
    section = Section("m.", "t.", (row("x", "column", "", "a{w} rows"),), {"rows": 4}, {"w": "b"})
    assert section.layout(()).source == {"m.ab": TensorSpec((4,))}
    assert section.placements() == {"t.x": Split(0)}


def test_the_scalar_of_a_gemma4_layer_is_kept_on_every_rank() -> None:
    family = LAYOUTS["gemma4"]
    config = family.config_from_hf(family.variants["dense"])
    iso = family.layout(config)
    assert iso.sources_of("layers.3.scalar") == ("model.layers.3.layer_scalar",)
    assert iso.target["layers.3.scalar"] == TensorSpec((1,))
    assert family.placements(config)["layers.3.scalar"] == Replicated()
