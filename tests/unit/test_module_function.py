"""Modules of other libraries as functions: against the module itself, and against PEFT's adapters in it."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import diffusers
import peft
import pytest
import torch
from torch import nn

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.adapter import Adapted
from areno_fn.contracts.errors import ModelError
from areno_fn.models.module_function import ModuleFunction

CONFIG = {
    "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "patch_size": 2, "in_channels": 4,
    "out_channels": 4, "joint_attention_dim": 12, "caption_projection_dim": 16, "pooled_projection_dim": 10,
    "sample_size": 8, "pos_embed_max_size": 8, "qk_norm": "rms_norm", "dual_attention_layers": (0,),
}  # fmt: skip
TARGETS = ["attn.to_q", "attn.to_out.0", "ff.net.2"]


def sd3() -> nn.Module:
    return diffusers.SD3Transformer2DModel(**CONFIG)


@pytest.fixture
def inputs() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(2, 4, 8, 8, generator=draw),
        "encoder_hidden_states": torch.randn(2, 3, 12, generator=draw),
        "pooled_projections": torch.randn(2, 10, generator=draw),
        "timestep": torch.tensor([300.0, 900.0]),
        "return_dict": False,
    }


def filled(seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    module = sd3().eval()
    return module, {name: value.detach() for name, value in module.state_dict().items()}


def test_the_function_is_the_module_and_differentiable_in_its_parameters(inputs: dict[str, Any]) -> None:
    module, leaves = filled()
    function = ModuleFunction(sd3)

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return function(params, **inputs)[0].square().mean()

    value, gradient = value_and_grad(loss)(leaves)
    there = module(**inputs)[0].square().mean()
    there.backward()
    assert torch.equal(value, there.detach())
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradient[name], parameter.grad, rtol=1e-6, atol=1e-9)


def test_nothing_of_a_call_stays(inputs: dict[str, Any]) -> None:
    function = ModuleFunction(sd3)
    first, second = filled(0)[1], filled(1)[1]
    before = function(first, **inputs)[0]
    function(second, **inputs)
    assert torch.equal(function(first, **inputs)[0], before)


def test_adapted_weights_answer_and_learn_as_in_peft(inputs: dict[str, Any]) -> None:
    module, leaves = filled()
    model = peft.get_peft_model(module, peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS))
    adapters = {}
    for name, part in model.named_modules():
        if isinstance(part, peft.tuners.lora.Linear):
            a, b = part.lora_A["default"].weight, part.lora_B["default"].weight
            torch.nn.init.normal_(b, std=0.2)
            adapters[name.removeprefix("base_model.model.") + ".weight"] = (a.detach(), 2.0 * b.detach())
    function = ModuleFunction(sd3)

    def loss(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        changed = {name: Adapted(weight=leaves[name], a=a, b=b) for name, (a, b) in pairs.items()}
        return function(leaves | changed, **inputs)[0].square().mean()

    value, gradient = value_and_grad(loss)(adapters)
    there = model(**inputs)[0].square().mean()
    there.backward()
    torch.testing.assert_close(value, there.detach(), rtol=1e-6, atol=1e-9)
    for name, part in model.named_modules():
        if isinstance(part, peft.tuners.lora.Linear):
            a, b = gradient[name.removeprefix("base_model.model.") + ".weight"]
            torch.testing.assert_close(a, part.lora_A["default"].weight.grad, rtol=1e-5, atol=1e-8)
            torch.testing.assert_close(2 * b, part.lora_B["default"].weight.grad, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(function(leaves, **inputs)[0], filled()[0](**inputs)[0])


def test_what_is_no_linear_map_is_not_adapted(inputs: dict[str, Any]) -> None:
    leaves = filled()[1]
    name = "pos_embed.proj.weight"
    odd = Adapted(weight=leaves[name].flatten(1), a=torch.zeros(1, 16), b=torch.zeros(16, 1))
    with pytest.raises(ModelError, match=r"pos_embed\.proj\.weight cannot be adapted: it belongs to a Conv2d"):
        ModuleFunction(sd3)(leaves | {name: odd}, **inputs)


class Placed(nn.Module):
    """A map, a table that is not stored, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)
        self.register_buffer("steps", torch.arange(4.0), persistent=False)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x + self.steps) * self.offset


def test_tables_that_are_not_stored_stay_and_those_that_are_come_with_the_parameters() -> None:
    function, x = ModuleFunction(Placed), torch.ones(2, 4)
    leaves = {"map.weight": torch.eye(4), "map.bias": torch.zeros(4), "offset": torch.full((4,), 2.0)}
    assert torch.equal(function(leaves, x), 2 * (1 + torch.arange(4.0)).expand(2, 4))
    assert torch.equal(function(leaves | {"offset": torch.zeros(4)}, x), torch.zeros(2, 4))


def test_what_is_missing_or_foreign_is_named() -> None:
    function, x = ModuleFunction(Placed), torch.ones(2, 4)
    leaves = {"map.weight": torch.eye(4), "map.bias": torch.zeros(4), "offset": torch.ones(4)}
    with pytest.raises(ModelError, match=r"^the parameters of a Placed lack map\.bias$"):
        function({name: leaf for name, leaf in leaves.items() if name != "map.bias"}, x)
    with pytest.raises(ModelError, match=r"^the parameters of a Placed hold what is not its own, steps$"):
        function(leaves | {"steps": torch.zeros(4)}, x)


class Block(nn.Module):
    """A residual map."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.map(self.norm(x)))


class Blocks(nn.Module):
    """Two blocks of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.traced
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, as the compiler is imported
def test_compiled_blocks_answer_and_learn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    # the default backend would call a C++ compiler for half a minute; what is tested is which graphs there are
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    torch._dynamo.utils.counters.clear()
    module = Blocks().eval()
    leaves = {name: value.detach() for name, value in module.state_dict().items()}
    plain, compiled = ModuleFunction(Blocks), ModuleFunction(Blocks, compiled=True)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    name = "blocks.0.map.weight"
    adapted = leaves | {name: Adapted(weight=leaves[name], a=torch.ones(2, 8), b=torch.full((8, 2), 0.1))}
    value, gradient = value_and_grad(lambda p: compiled(p, x).square().mean())(adapted)
    expected, there = value_and_grad(lambda p: plain(p, x).square().mean())(adapted)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient[name].b, there[name].b)
    torch.testing.assert_close(gradient["blocks.1.map.weight"], there["blocks.1.map.weight"])
    with torch.no_grad():
        torch.testing.assert_close(compiled(leaves, x), plain(leaves, x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3  # adapted, not adapted, without a gradient


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_47_blocks_that_are_computed_again_give_the_gradient_and_keep_less(
    every: int, adapted: bool, inputs: dict[str, Any]
) -> None:
    leaves: dict[str, Any] = filled()[1]
    if adapted:
        for block in range(2):
            name = f"transformer_blocks.{block}.attn.to_q.weight"
            draw = torch.Generator().manual_seed(block)
            a, b = torch.randn(3, 16, generator=draw), torch.randn(16, 3, generator=draw)
            leaves[name] = Adapted(weight=leaves[name], a=a, b=b)
    plain = ModuleFunction(sd3)
    again = plain.computing_again(every)

    def measured(function: ModuleFunction) -> Any:
        return value_and_grad(lambda params: function(params, **inputs)[0].square().mean())(leaves)

    def kept(function: ModuleFunction) -> int:
        found: list[int] = []
        followed = tree.map(lambda x: x.detach().requires_grad_(), leaves)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: found.append(x.numel()) or x, lambda x: x):
            function(followed, **inputs)
        return sum(found)

    expected, received = measured(plain), measured(again)
    assert torch.equal(expected[0], received[0])
    for (path, one), other in zip(tree.leaves_with_path(expected[1]), tree.leaves(received[1]), strict=True):
        torch.testing.assert_close(
            other, one, rtol=1e-5, atol=1e-8, msg=path
        )  # what blocks share is added up otherwise
    assert kept(again) < kept(plain)
    with torch.no_grad():
        assert torch.equal(again(leaves, **inputs)[0], plain(leaves, **inputs)[0])
