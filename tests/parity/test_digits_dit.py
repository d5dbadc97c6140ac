"""The DiT against diffusers' own module: velocities, gradients, and folders that either writes and the other reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel
from flow_models import numbers

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.ckpt.folder import open_folder
from areno_fn.ckpt.load import load
from areno_fn.ckpt.naming import DIFFUSERS
from areno_fn.ckpt.save import save
from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.key import Key
from areno_fn.models.digits_dit import DiTConfig, config_from_hf, config_to_hf
from areno_fn.models.digits_dit.checkpoint import layout
from areno_fn.models.digits_dit.model import DiT, DiTPolicy, init, shapes

SMALL = DiTConfig(num_classes=3, sample_size=6, channels=2, patch_size=3, num_layers=2, num_heads=2, head_dim=6)
CONFIGS = [
    SMALL,
    DiTConfig(num_layers=1),
    DiTConfig(num_heads=1, head_dim=12, num_layers=3, patch_size=1, sample_size=4),
]
ROWS = 3


def theirs(config: DiTConfig) -> DiTTransformer2DModel:
    fields = {name: value for name, value in config_to_hf(config).items() if not name.startswith("_")}
    module = DiTTransformer2DModel(**fields).eval()
    state = {name: numbers(name, *x.shape, scale=0.3) for name, x in module.state_dict().items()}
    module.load_state_dict(state)
    return module


def ours(config: DiTConfig, module: torch.nn.Module) -> DiT:
    leaves = layout(config)(dict(module.state_dict()))
    like = shapes(config)
    return tree.unflatten(like, [leaves[path] for path, _ in tree.leaves_with_path(like)])


def inputs(config: DiTConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (ROWS, config.channels, config.sample_size, config.sample_size)
    return numbers("state", *shape), torch.tensor([1000.0, 250.5, 3.0]), torch.tensor([0, config.num_classes, 2])


@pytest.mark.parametrize("config", CONFIGS)
def test_the_velocity_is_that_of_diffusers(config: DiTConfig) -> None:
    module, (state, time, labels) = theirs(config).double(), inputs(config)
    params = ours(config, module)
    with torch.no_grad():
        expected = module(state.double(), time, labels).sample
    received = DiTPolicy(config).velocity(params, state, time, labels)
    assert received.shape == state.shape == (ROWS, *DiTPolicy(config).latent_shape)
    assert (received - expected).abs().max() <= 1e-6 * float(expected.abs().max())


def test_the_gradient_is_that_of_diffusers() -> None:
    module, (state, time, labels) = theirs(SMALL), inputs(SMALL)
    params, direction = ours(SMALL, module), numbers("direction", *state.shape)
    _, slope = value_and_grad(lambda p: (DiTPolicy(SMALL).velocity(p, state, time, labels) * direction).sum())(params)
    (module(state, time, labels).sample * direction).sum().backward()
    expected = layout(SMALL)({name: x.grad for name, x in module.named_parameters()})
    for path, leaf in tree.leaves_with_path(slope):
        scale = float(expected[path].abs().max())
        assert scale > 0 and (leaf - expected[path]).abs().max() <= 1e-4 * scale, path


def test_a_folder_is_read_by_diffusers_and_one_of_diffusers_here(tmp_path: Path) -> None:
    module, (state, time, labels) = theirs(SMALL), inputs(SMALL)
    params = ours(SMALL, module)
    save(tmp_path / "ours", params, layout(SMALL), config_to_hf(SMALL), naming=DIFFUSERS)
    again = DiTTransformer2DModel.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(again(state, time, labels).sample, module(state, time, labels).sample)
    module.save_pretrained(tmp_path / "theirs")
    folder = open_folder(tmp_path / "theirs")
    assert config_from_hf(folder.config) == SMALL
    assert tree.equal(load(folder, layout(SMALL), like=shapes(SMALL)), params)


def test_a_configuration_survives() -> None:
    for config in CONFIGS:
        assert config_from_hf(config_to_hf(config)) == config
    assert config_from_hf({"_class_name": "DiTTransformer2DModel"}) == DiTConfig(
        num_classes=1000, sample_size=32, channels=4, num_layers=28, num_heads=16, head_dim=72
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"out_channels": 2}, "out_channels must be the 1 channels that go in"),
        ({"norm_type": "layer_norm"}, "norm_type is 'layer_norm', which is not supported"),
        ({"depth": 3}, "the field 'depth' is unknown"),
        ({"patch_size": 3}, "sample_size 8 is not a multiple of patch_size 3"),
        ({"attention_head_dim": 1, "num_attention_heads": 2}, "must be a multiple of 4 for positions, received 2"),
    ],
)
def test_configurations_that_are_not_supported_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        config_from_hf(config_to_hf(DiTConfig()) | fields)
    with pytest.raises(ModelError, match="num_layers must be at least 1, received 0"):
        DiTConfig(num_layers=0)


def test_a_new_model_says_0_and_its_numbers_belong_to_their_places() -> None:
    first, more = init(SMALL, Key.of(1)), init(DiTConfig(num_layers=3), Key.of(1))
    state, time, labels = inputs(SMALL)
    assert not DiTPolicy(SMALL).velocity(first, state, time, labels).any()
    assert torch.equal(init(DiTConfig(num_layers=1), Key.of(1)).blocks[0].qkv, more.blocks[0].qkv)
    assert not torch.equal(more.blocks[0].qkv, more.blocks[1].qkv)
    assert float(more.blocks[0].up.std()) == pytest.approx(96**-0.5, rel=0.05)


def test_what_does_not_fit_is_refused() -> None:
    params, (state, time, labels) = init(SMALL, Key.of(0)), inputs(SMALL)
    ask = DiTPolicy(SMALL).velocity
    with pytest.raises(ModelError, match="label 4 is none of the 3 classes, nor 3, which stands for no class"):
        ask(params, state, time, torch.tensor([0, 4, 1]))
    with pytest.raises(ModelError, match="label -1 is none of the 3 classes"):
        ask(params, state, time, torch.tensor([0, -1, 1]))
    with pytest.raises(ModelError, match=r"takes states \[-1, 2, 6, 6\] and labels int64 \[B\]"):
        ask(params, state[:, :1], time, labels)
