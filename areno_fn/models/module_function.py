"""A module of another library as a function of its parameters, adapted or not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from areno_fn.autodiff import remat
from areno_fn.contracts.adapter import Adapted, Weight
from areno_fn.contracts.errors import ModelError

Parameters = Mapping[str, Weight]
"""What `state_dict()` calls them; the weight of a linear map may be an `Adapted`."""

_VARIANTS = 64
"""How many graphs of a block Dynamo may keep: of each kind of block, with and without a gradient, for every batch size."""


class ModuleFunction:
    """`answer = function(params, *args, **inputs)`, the forward of a module that holds no parameters of its own.

    It is differentiable in the parameters, and pure if the module is: nothing of a call stays. An adapted weight is
    multiplied as `x weight^T + (x a^T) b^T` and never merged.

    Compiled, every element of the module's own lists (its blocks) is one graph of `torch.compile`, which blocks of
    one kind share. Results then differ from the uncompiled ones by roundings. Compiling takes a while when a kind of block
    first meets a batch size.

    Args:
        build: makes the module, in eval mode and on the CPU; it is called once, and its parameters take no memory.
        compiled: whether blocks are compiled.
    """

    def __init__(self, build: Callable[[], nn.Module], *, compiled: bool = False) -> None:
        self._module = _without_values(build)
        self._compiled = compiled
        self._again = 0
        self._prepared: dict[tuple[frozenset[str], torch.device], nn.Module] = {}

    def __call__(self, params: Parameters, *args: Any, **inputs: Any) -> Any:
        """The module's answer.

        Args:
            params: everything of its `state_dict()`, on one device.
            args, inputs: what its `forward` takes.

        Raises:
            ModelError: a tensor is missing or not the module's, or an adapted weight is not that of a linear map.
        """
        flat = _flat(params)
        adapted = frozenset(name for name, leaf in params.items() if isinstance(leaf, Adapted))
        where = adapted, next(iter(flat.values())).device
        module = self._prepared.get(where)
        if module is None:
            module = self._prepared[where] = self._prepare(params, *where)
        with torch._dynamo.config.patch(recompile_limit=_VARIANTS):
            return torch.func.functional_call(module, flat, args, inputs)

    def computing_again(self, every: int) -> ModuleFunction:
        """The same function, of whose blocks every so many-th, from the first, keeps its input alone; 0 for none.

        What it made is computed again in the backward pass.
        """
        found = copy.copy(self)
        found._again, found._prepared = every, {}
        return found

    def _prepare(self, params: Parameters, adapted: frozenset[str], device: torch.device) -> nn.Module:
        differing = sorted(params.keys() ^ self._module.state_dict().keys())
        if differing:
            problem = "lack" if differing[0] not in params else "hold what is not its own,"
            raise ModelError(f"the parameters of a {type(self._module).__name__} {problem} {differing[0]}")
        module = copy.deepcopy(self._module)
        for name in sorted(adapted):
            path = name.removesuffix(".weight")
            found = module.get_submodule(path)
            if type(found) is not nn.Linear:
                raise ModelError(
                    f"{name} cannot be adapted: it belongs to a {type(found).__name__}, not to a linear map"
                )
            module.set_submodule(path, _AdaptedLinear(found))
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                if not buffer.is_meta:
                    setattr(part, name, buffer.to(device))
        lists = (child for child in module.children() if isinstance(child, nn.ModuleList))
        for place, block in enumerate(block for blocks in lists for block in blocks):
            inside = block
            if self._again and place % self._again == 0:
                inside = copy.deepcopy(block)
                block.forward = _computed_again(block, inside)
            if self._compiled:
                inside.compile(dynamic=False)
        return module


def _computed_again(block: nn.Module, inside: nn.Module) -> Callable[..., Any]:
    """A forward for a block that keeps no more than its inputs; `inside` is the block itself, without parameters."""

    def computed(tensors: dict[str, torch.Tensor], args: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        return torch.func.functional_call(inside, tensors, args, inputs)

    again = remat(computed)

    def forward(*args: Any, **inputs: Any) -> Any:
        # within a call of the function these are its parameters
        tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
        return (again if torch.is_grad_enabled() else computed)(tensors, args, inputs)

    return forward


def _without_values(build: Callable[[], nn.Module]) -> nn.Module:
    """The module with meta tensors for all that its file holds; tables that it computes for itself stay."""

    def empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        del module, name
        return None if parameter is None else nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(empty)  # type: ignore[arg-type]  # what it returns is registered
    try:
        module = build().eval()
    finally:
        hook.remove()
    stored = module.state_dict().keys()
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if f"{path}.{name}".lstrip(".") in stored:
                setattr(part, name, buffer.to("meta"))
    return module


class _AdaptedLinear(nn.Module):
    """A linear map with room for an `Adapted`."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = like.weight, like.bias
        self.a, self.b = (nn.Parameter(torch.empty(0, device="meta"), requires_grad=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))
        return F.linear(x, self.weight, self.bias) + change


def _flat(params: Parameters) -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}
    for name, leaf in params.items():
        if isinstance(leaf, Adapted):
            path = name.removesuffix("weight")
            flat |= {name: leaf.weight, f"{path}a": leaf.a, f"{path}b": leaf.b}
        else:
            flat[name] = leaf
    return flat
