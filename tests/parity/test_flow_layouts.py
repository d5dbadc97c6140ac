"""Layouts of flow-matching transformers against diffusers' own modules."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_toys import same_bits
from flow_toys import PUBLISHED, VARIANTS, configs, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from areno_fn.ckpt.folder import open_folder
from areno_fn.ckpt.load import load
from areno_fn.ckpt.save import save
from areno_fn.contracts.layout import TensorSpec
from areno_fn.contracts.placement import Fused, Replicated, Split
from areno_fn.models.flow_layouts import FLOW_LAYOUTS

diffusers = pytest.importorskip("diffusers", reason="diffusers is needed to compare with: pip install 'areno-fn[test]'")

LARGE = (
    "Stable Diffusion 3.5 medium", "Flux.1 dev", "Flux.2 dev", "Qwen-Image", "Z-Image Turbo",
    "Wan 2.1 first and last frame to video 14B", "LTX-2.3",
)  # fmt: skip
PLANNED = ("flux", "flux2", "qwen_image")
"""The families for which diffusers says how ranks share the weights."""


def module(hf: Mapping[str, Any], device: str = "meta") -> torch.nn.Module:
    with torch.device(device):
        made: torch.nn.Module = getattr(diffusers, hf["_class_name"]).from_config(dict(hf))
    return made


def require_same_tensors(family: str, hf: Mapping[str, Any]) -> None:
    layouts, reference = FLOW_LAYOUTS[family], module(hf)
    config = layouts.config_from_hf(hf)
    expected = {name: TensorSpec(tuple(value.shape)) for name, value in reference.state_dict().items()}
    layout = layouts.layout(config)
    assert dict(layout.source) == expected
    assert dict(layout.target) == expected
    assert layouts.placements(config).keys() == expected.keys()
    assert layouts.buffers(config) == {name for name, _ in reference.named_buffers()} & expected.keys()
    assert layouts.parameters(config) == sum(value.numel() for value in reference.parameters())


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_every_variant_has_the_tensors_of_its_module(family: str, variant: str) -> None:
    require_same_tensors(family, tiny(family, variant))


@pytest.mark.parametrize("family", FLOW_LAYOUTS)
@settings(settings.get_profile("layouts"))
@given(data=st.data())
def test_random_configurations_have_the_tensors_of_their_modules(family: str, data: st.DataObject) -> None:
    require_same_tensors(family, data.draw(configs(family)))


@pytest.mark.parametrize("name", LARGE)
def test_published_configurations_have_the_tensors_of_their_modules(name: str) -> None:
    published = PUBLISHED[name]
    require_same_tensors(published.family, published.hf)


@pytest.mark.parametrize("family", FLOW_LAYOUTS)
def test_a_configuration_without_fields_means_the_defaults_of_diffusers(family: str) -> None:
    layouts = FLOW_LAYOUTS[family]
    parameters = inspect.signature(getattr(diffusers, layouts.name).__init__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name != "self"}
    named = {"_class_name": layouts.name}
    assert layouts.config_from_hf(named | defaults) == layouts.config_from_hf(named)


@pytest.mark.parametrize("family", FLOW_LAYOUTS)
def test_what_is_left_out_is_what_diffusers_ignores(family: str) -> None:
    ignored = getattr(diffusers, FLOW_LAYOUTS[family].name)._keys_to_ignore_on_load_unexpected or []
    assert [word for word in ignored if not any(word in pattern for pattern in FLOW_LAYOUTS[family].left_out)] == []
    assert len(FLOW_LAYOUTS[family].left_out) == len(ignored)


@pytest.mark.parametrize("family", FLOW_LAYOUTS)
def test_what_diffusers_writes_into_a_config_is_read(family: str) -> None:
    reference = module(next(iter(FLOW_LAYOUTS[family].tiny().values())))
    written = {**reference.config, "_class_name": FLOW_LAYOUTS[family].name, "_diffusers_version": "0.42.1"}
    config = FLOW_LAYOUTS[family].config_from_hf(written)
    assert FLOW_LAYOUTS[family].layout(config).source.keys() == reference.state_dict().keys()


@pytest.mark.parametrize(("family", "variant"), [row for row in VARIANTS if row[0] in PLANNED])
def test_ranks_share_the_weights_as_diffusers_plans(family: str, variant: str) -> None:
    hf = tiny(family, variant)
    reference = module(hf)
    config = FLOW_LAYOUTS[family].config_from_hf(hf)
    for name, placement in FLOW_LAYOUTS[family].placements(config).items():
        layer, _, kind = name.rpartition(".")
        plan = [style for pattern, style in reference._tp_plan.items() if fnmatch.fnmatchcase(layer, pattern)]
        planned = plan[0] if plan else "replicated"
        linear = reference.get_submodule(layer)
        if isinstance(placement, Replicated):
            assert planned == "replicated" or (kind == "bias" and _dim(planned) == 1), name
            continue
        assert placement.dim == _dim(planned), name
        assert _sizes(placement, linear) == _planned_sizes(planned, linear), name


def _dim(planned: Any) -> int:
    text = planned if isinstance(planned, str) else type(planned).__name__.lower()
    return {"colwise": 0, "packedcolwiseparallel": 0, "rowwise": 1, "packedrowwiseparallel": 1}[text]


def _length(linear: torch.nn.Module, dim: int) -> int:
    return linear.weight.shape[dim]


def _sizes(placement: Split | Fused, linear: torch.nn.Module) -> list[int]:
    if isinstance(placement, Split):
        return [_length(linear, placement.dim)]
    return [block.size for block in placement.blocks]


def _planned_sizes(planned: Any, linear: torch.nn.Module) -> list[int]:
    """What diffusers deals apart: ratios given with the plan, or sizes that stand on the layer."""
    dim = _dim(planned)
    if isinstance(planned, str):
        return [_length(linear, dim)]
    stored = "_tp_packed_col_blocks" if dim == 0 else "_tp_packed_row_blocks"
    ratios = planned.blocks if planned.blocks is not None else getattr(linear, stored)
    return [ratio * _length(linear, dim) // sum(ratios) for ratio in ratios]


# ------------------------------------------------------------------------------- through files, both libraries


def inputs(family: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a small forward."""

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))

    time = torch.tensor([0.3])
    if family == "z_image":
        return {"x": [noise(3, 1, 4, 4)], "t": time, "cap_feats": [noise(5, hf["cap_feat_dim"])]}
    if family == "wan":
        text = {"timestep": time, "encoder_hidden_states": noise(1, 5, hf["text_dim"])}
        image = {"encoder_hidden_states_image": noise(1, 4, hf["image_dim"])} if hf.get("image_dim") else {}
        return {"hidden_states": noise(1, hf["in_channels"], 2, 4, 4)} | text | image
    if family == "ltx2":
        sizes = {"num_frames": 1, "height": 2, "width": 2, "audio_num_frames": 3, "fps": 24.0}
        return sizes | {
            "hidden_states": noise(1, 4, hf["in_channels"]),
            "audio_hidden_states": noise(1, 3, hf["audio_in_channels"]),
            "encoder_hidden_states": noise(1, 5, hf["caption_channels"]),
            "audio_encoder_hidden_states": noise(1, 5, hf["caption_channels"]),
            "timestep": time,
        }
    text = {"timestep": time, "encoder_hidden_states": noise(1, 5, hf["joint_attention_dim"])}
    if family == "sd3":
        pooled = {"pooled_projections": noise(1, hf["pooled_projection_dim"])}
        return {"hidden_states": noise(1, hf["in_channels"], 4, 4)} | text | pooled
    image = {"hidden_states": noise(1, 4, hf["in_channels"])}
    if family == "qwen_image":
        return image | text | {"img_shapes": [[(1, 2, 2)]], "encoder_hidden_states_mask": torch.ones(1, 5)}
    axes = len(hf["axes_dims_rope"])
    places = {"img_ids": torch.arange(4.0)[:, None].expand(4, axes), "txt_ids": torch.zeros(5, axes)}
    pooled = {"pooled_projections": noise(1, hf["pooled_projection_dim"])} if family == "flux" else {}
    return image | text | places | pooled | {"guidance": torch.tensor([3.5])}


def outputs(result: Any) -> list[torch.Tensor]:
    """The tensors of what a module returned."""
    items = result if isinstance(result, tuple | list) else [result]
    return [tensor for item in items for tensor in (outputs(item) if isinstance(item, tuple | list) else [item])]


FORWARDS = (
    ("sd3", "3.5 medium"), ("flux", "dev"), ("flux2", "dev"), ("qwen_image", "image"), ("z_image", "image"),
    ("wan", "image to video"), ("ltx2", "2"),
)  # fmt: skip


@pytest.mark.parametrize("shard", ["1MB", "30KB"])
@pytest.mark.parametrize(("family", "variant"), FORWARDS)
def test_a_module_saved_there_computes_the_same_here_and_after_it_is_saved_here(
    family: str, variant: str, shard: str, tmp_path: Path
) -> None:
    hf = tiny(family, variant)
    layouts = FLOW_LAYOUTS[family]
    theirs = module(hf, "cpu").eval()
    for number, value in enumerate(theirs.parameters()):
        value.data = torch.randn(value.shape, generator=torch.Generator().manual_seed(number)) / value.numel() ** 0.25
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    given = inputs(family, hf)
    with torch.no_grad():
        expected = outputs(theirs(**given, return_dict=False))

    opened = open_folder(tmp_path / "theirs")
    layout = layouts.layout(layouts.config_from_hf(opened.config))
    leaves = load(opened, layout)
    empty = module(hf, "cpu").eval()
    with torch.no_grad():
        here = outputs(torch.func.functional_call(empty, leaves, (), {**given, "return_dict": False}))
    assert all(torch.equal(a, b) for a, b in zip(here, expected, strict=True))

    save(
        tmp_path / "ours",
        leaves,
        layout,
        opened.config,
        source=opened,
        shard_bytes=1_000_000 if shard == "1MB" else 30_000,
    )
    back = type(theirs).from_pretrained(tmp_path / "ours")
    assert same_bits(back.state_dict(), theirs.state_dict())
    for value in (*back.parameters(), *back.buffers()):
        value.data = value.data.clone()  # the last bits of a product follow alignment, and a mapped file has none
    with torch.no_grad():
        again = outputs(back.eval()(**given, return_dict=False))
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    assert all(bool(torch.isfinite(tensor).all()) and float(tensor.std()) > 0 for tensor in expected)
