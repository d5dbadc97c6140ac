"""Layouts of flow-matching transformers: configurations, sizes, round trips through files, and ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_toys import read_files, same_bits, state_dict, write_folder
from flow_toys import PUBLISHED, VARIANTS, configs, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from areno_fn.ckpt.folder import open_folder
from areno_fn.ckpt.load import load
from areno_fn.ckpt.save import save
from areno_fn.contracts.errors import CheckpointError, LayoutError, ModelError
from areno_fn.contracts.layout import Iso
from areno_fn.contracts.placement import Fused, Placement, Replicated, Split, place, rank_name
from areno_fn.models.flow_checkpoint import columns, linear, read, rows, table, tensor
from areno_fn.models.flow_layouts import FLOW_LAYOUTS
from areno_fn.testing import laws

DTYPES = (torch.bfloat16, torch.float32)
FILES = settings(
    settings.get_profile("layouts"), max_examples=max(3, settings.get_profile("layouts").max_examples // 3)
)
"""A third of the examples, since each of these writes and reads folders."""
RANKS = (1, 2, 3, 4, 8)
UNEVEN = ("flux2", "z_image")
"""The families whose networks may have a width that ranks cannot share although they can share the heads."""


def read_config(family: str, **fields: Any) -> Any:
    return FLOW_LAYOUTS[family].config_from_hf({"_class_name": FLOW_LAYOUTS[family].name, **fields})


def heads_of(config: Any) -> int:
    """A number that divides all numbers of heads."""
    if hasattr(config, "video"):
        return math.gcd(config.video.num_heads, config.audio.num_heads)
    return int(config.num_heads)


# --------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    published = PUBLISHED[name]
    layouts = FLOW_LAYOUTS[published.family]
    count = layouts.parameters(layouts.config_from_hf(published.hf))
    digits = len(published.billions.partition(".")[2])
    assert f"{count / 1e9:.{digits}f}" == published.billions
    assert published.exactly in (None, count)


@pytest.mark.parametrize("family", FLOW_LAYOUTS)
def test_only_the_grid_of_sd3_is_stored_and_not_trained(family: str) -> None:
    config = FLOW_LAYOUTS[family].config_from_hf(next(iter(FLOW_LAYOUTS[family].tiny().values())))
    assert FLOW_LAYOUTS[family].buffers(config) == ({"pos_embed.pos_embed"} if family == "sd3" else set())


# --------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_files_and_leaves_of_every_variant_round_trip(family: str, variant: str) -> None:
    layouts = FLOW_LAYOUTS[family]
    config = layouts.config_from_hf(tiny(family, variant))
    laws.checkpoint_roundtrip(layouts.layout(config), dtypes=DTYPES)


@pytest.mark.parametrize("family", FLOW_LAYOUTS)
@settings(FILES)
@given(data=st.data())
def test_random_configurations_round_trip_on_any_number_of_ranks(family: str, data: st.DataObject) -> None:
    layouts = FLOW_LAYOUTS[family]
    config = layouts.config_from_hf(data.draw(configs(family)))
    count = data.draw(st.sampled_from([ranks for ranks in RANKS if not heads_of(config) % ranks]))
    placements = layouts.placements(config)
    tried = laws.checkpoint_roundtrip(layouts.layout(config), placements=placements, ranks=(count,), dtypes=DTYPES)
    assert tried == (count,) or family in UNEVEN


def test_a_norm_that_nothing_reads_is_left_out_and_written_again(tmp_path: Path) -> None:
    layouts = FLOW_LAYOUTS["wan"]
    layout = layouts.layout(layouts.config_from_hf(tiny("wan", "image to video")))
    extra = {f"blocks.{number}.attn2.norm_added_q.weight": torch.full((24,), float(number)) for number in (0, 1)}
    file = state_dict(layout, torch.bfloat16) | extra
    source = open_folder(write_folder(tmp_path / "source", file))
    with pytest.raises(CheckpointError, match="norm_added_q.weight' is not declared"):
        load(source, layout)
    leaves = load(source, layout, left_out=layouts.left_out)
    assert leaves.keys() == layout.target.keys()
    out = save(tmp_path / "out", leaves, layout, {}, source=source, left_out=layouts.left_out)
    assert same_bits(read_files(out)[0], file)


# --------------------------------------------------------------------------------------------------- ranks


def dealt(family: str, hf: dict[str, Any], ranks: int) -> Iso:
    config = FLOW_LAYOUTS[family].config_from_hf(hf)
    layout = FLOW_LAYOUTS[family].layout(config)
    return layout >> place(layout.target, FLOW_LAYOUTS[family].placements(config), ranks)


@pytest.mark.parametrize("family", FLOW_LAYOUTS)
def test_heads_are_not_torn(family: str) -> None:
    hf = dict(next(iter(FLOW_LAYOUTS[family].tiny().values())))
    dealt(family, hf, 2)
    with pytest.raises(LayoutError, match=r"2 heads cannot be dealt to 4 ranks"):
        dealt(family, hf, 4)


INTO = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
OVER_HEADS = ("norm_q", "norm_k", "norm_added_k")
FIRST = ("net.0.proj", "proj_mlp", "linear_in", "w1", "w3")
SECOND = ("net.2", "linear_out", "w2")
FUSED = ("to_qkv_mlp_proj.weight", "single_transformer_blocks.0.attn.to_out.weight", ".0.proj_out.weight")
"""Of these the blocks are compared with diffusers."""


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_what_enters_a_sum_is_cut_by_columns_and_what_feeds_it_by_rows(family: str, variant: str) -> None:
    config = FLOW_LAYOUTS[family].config_from_hf(tiny(family, variant))
    streams = (config.video, config.audio) if family == "ltx2" else (config,)
    heads = {stream.width: stream.num_heads for stream in streams}
    for name, leaf in FLOW_LAYOUTS[family].leaves(config).items():
        stack, _, rest = name.partition(".0.")
        if stack.endswith(("blocks", "layers", "_refiner")) and not name.endswith(FUSED):
            assert cut_of(leaf.placement) == expected_cut(rest, leaf.spec.shape, heads), name
        elif "blocks." not in name and "layers." not in name and "_refiner." not in name:
            assert leaf.placement == Replicated(), name


def expected_cut(name: str, shape: tuple[int, ...], heads: dict[int, int]) -> tuple[int, int] | None:
    """How a tensor of a block is cut, by the part that its layer has: see `cut_of`."""
    layer, _, kind = name.rpartition(".")
    if layer.endswith((*INTO, *OVER_HEADS)) and shape[0] in heads:
        return 0, heads[shape[0]]
    if layer.endswith("to_gate_logits"):
        return 0, shape[0]
    if layer.endswith(FIRST):
        return 0, 0
    if layer.endswith(("to_out.0", "to_add_out")) and kind == "weight":
        return 1, heads[shape[1]]
    return (1, 0) if layer.endswith(SECOND) and kind == "weight" else None


def cut_of(placement: Placement) -> tuple[int, int] | None:
    """The dimension that is cut, and the heads that stay whole in its first block."""
    match placement:
        case Split(dim):
            return dim, 0
        case Fused(blocks, dim):
            return dim, blocks[0].heads
        case _:
            return None


def test_a_rank_of_flux2_holds_its_heads_of_q_k_v_and_its_channels_of_both_halves() -> None:
    hf = FLOW_LAYOUTS["flux2"].tiny()["dev"] | {"attention_head_dim": 2, "mlp_ratio": 1.0}
    both = dealt("flux2", hf, 2)
    whole = {name: torch.zeros(spec.shape) for name, spec in both.source.items()}
    into, out = (f"single_transformer_blocks.0.attn.{name}.weight" for name in ("to_qkv_mlp_proj", "to_out"))
    whole[into] += torch.arange(20.0)[:, None]  # q 0..3, k 4..7, v 8..11, gate 12..15, up 16..19
    whole[out] += torch.arange(8.0)  # attention 0..3, network 4..7
    held = both(whole)
    assert held[rank_name(0, into)][:, 0].tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 16, 17]
    assert held[rank_name(1, into)][:, 0].tolist() == [2, 3, 6, 7, 10, 11, 14, 15, 18, 19]
    assert held[rank_name(0, out)][0].tolist() == [0, 1, 4, 5]
    assert held[rank_name(1, out)][0].tolist() == [2, 3, 6, 7]


# ------------------------------------------------------------------------------------------------ refusals

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a field nobody knows": ("flux", {"is_tp": True}, "the field 'is_tp' is unknown"),
    "quantised weights": ("wan", {"quantization_config": {"quant_method": "gguf"}}, "quantization_config is"),
    "null where it means nothing": ("flux2", {"guidance_embeds": None}, "guidance_embeds is null, which says nothing"),
    "a size that is text": ("qwen_image", {"num_layers": "60"}, "num_layers must be an integer of at least 1, received '60'"),
    "no heads": ("flux", {"num_attention_heads": 0}, "num_attention_heads must be an integer of at least 1"),
    "a flag that is a number": ("flux", {"guidance_embeds": 1}, "guidance_embeds must be true or false, received 1"),
    "another norm": ("sd3", {"qk_norm": "layer_norm"}, "qk_norm is 'layer_norm', which is not supported"),
    "another norm of wan": ("wan", {"qk_norm": "rms_norm"}, "it can only be 'rms_norm_across_heads'"),
    "text of another width": ("sd3", {"caption_projection_dim": 9}, "caption_projection_dim is 9, but heads times"),
    "a layer too many": ("sd3", {"num_layers": 2, "dual_attention_layers": [0, 2]}, "dual_attention_layers has 2, but there are 2"),
    "layers that are text": ("sd3", {"dual_attention_layers": ["0"]}, "dual_attention_layers must be a list of integers"),
    "grouped heads": ("z_image", {"n_kv_heads": 10}, "n_kv_heads 10 equal to it"),
    "heads that do not divide": ("z_image", {"n_heads": 7, "n_kv_heads": 7}, "dim 3840 must be a multiple of n_heads 7"),
    "two counts of heads": ("z_image", {"nheads": 29}, "nheads is 29, which is not supported; it can only be 30"),
    "patches without frames": ("z_image", {"all_patch_size": [1, 2]}, "must pair up to distinct patches"),
    "a patch twice": ("z_image", {"all_patch_size": [2, 2], "all_f_patch_size": [1, 1]}, "must pair up to distinct"),
    "a flat patch": ("wan", {"patch_size": [2, 2]}, "patch_size must be frames, height and width, received (2, 2)"),
    "another activation": ("ltx2", {"activation_fn": "geglu"}, "activation_fn is 'geglu'"),
    "a ratio that is no number": ("flux2", {"mlp_ratio": "3"}, "mlp_ratio must be a number, received '3'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_configurations_that_are_refused(name: str) -> None:
    family, fields, words = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        read_config(family, **fields)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{FLOW_LAYOUTS[family].name} configuration: ")


@pytest.mark.parametrize("family", FLOW_LAYOUTS)
def test_the_class_must_be_that_of_the_family(family: str) -> None:
    with pytest.raises(ModelError, match="_class_name is missing"):
        FLOW_LAYOUTS[family].config_from_hf({})
    with pytest.raises(ModelError, match=f"_class_name is 'UNet', it must be '{FLOW_LAYOUTS[family].name}'"):
        FLOW_LAYOUTS[family].config_from_hf({"_class_name": "UNet"})


def test_null_channels_are_those_that_go_in_and_absent_ones_the_default() -> None:
    assert read_config("qwen_image", in_channels=7).out_channels == 16
    assert read_config("qwen_image", in_channels=7, out_channels=None).out_channels == 7
    assert read_config("flux", in_channels=7).out_channels == 7


# -------------------------------------------------------------------------------------------------- tables


def test_a_table_says_sizes_cuts_flags_and_biases() -> None:
    lines = table(
        linear("a", "2*w+3", "w", cut=rows("2*w+3")),
        linear("b", "w", "h*w", cut=columns("w/h"), when="deep", bias="biased"),
        linear("c", "w", "w", when="!deep", bias="never"),
        tensor("d", "1", "w", buffer=True),
    )
    sizes = {"w": 4, "h": 2}
    plain = read(lines, sizes, prefix="p.")
    assert {name: leaf.spec.shape for name, leaf in plain.items()} == {
        "p.a.weight": (11, 4), "p.a.bias": (11,), "p.c.weight": (4, 4), "p.d": (1, 4),
    }  # fmt: skip
    assert list(read(lines, sizes, {"deep"})) == ["a.weight", "a.bias", "b.weight", "d"]
    deep = read(lines, sizes, {"deep", "biased"})
    assert deep["b.weight"].placement.dim == 1 and deep["b.weight"].placement.blocks[0].heads == 2
    assert deep["b.bias"].placement == Replicated()
    assert deep["a.bias"].placement == deep["a.weight"].placement
    assert [name for name, leaf in deep.items() if leaf.buffer] == ["d"]
