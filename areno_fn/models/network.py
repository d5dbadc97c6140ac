"""A module of diffusers as a function of a parameter tree, whose leaves have the names of the file."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from areno_fn.contracts.adapter import Adapted, Weight
from areno_fn.contracts.errors import ModelError
from areno_fn.kernels.linear import linear

_WITHOUT_NUMBERS = ("empty", "rand", "randn")
_A, _B = "change_a", "change_b"


class Network:
    """A module that was made without parameters, called with some.

    Args:
        class_name: of the module, in diffusers.
        config: its config.json.

    Raises:
        ModelError: diffusers is not installed, has no such class, or does not take the configuration.
    """

    def __init__(self, class_name: str, config: Mapping[str, Any]) -> None:
        given = {name: value for name, value in config.items() if not name.startswith("_")}
        kind = _class(class_name)
        try:
            with _Weightless():
                module = kind(**given)
        except (TypeError, ValueError) as error:
            raise ModelError(f"diffusers makes no {class_name} of this configuration: {error}") from error
        stored = module.state_dict().keys()
        fixed = {name: buffer for name, buffer in module.named_buffers() if name not in stored}
        empty = [name for name, buffer in fixed.items() if buffer.is_meta]
        if empty:
            raise ModelError(f"{class_name}: the numbers of {empty[0]!r} are neither stored nor computed")
        for part in module.modules():
            if type(part) is torch.nn.Linear:
                part.__class__ = _Adaptable
        self._module = module.eval()
        self._fixed = fixed
        self._on = {torch.device("cpu"): fixed}
        self.names = tuple(stored)
        """The tensors of its state dict."""

    def __call__(self, params: Mapping[str, Weight], *args: Any, **inputs: Any) -> Any:
        """What the module returns with these parameters, adapted or not; nothing of it is changed."""
        first = next(iter(params.values()))
        device = (first.weight if isinstance(first, Adapted) else first).device
        if device not in self._on:
            self._on[device] = {name: buffer.to(device) for name, buffer in self._fixed.items()}
        given = {**self._on[device], **_spread(params)}
        return torch.func.functional_call(self._module, given, args, inputs, tie_weights=False)


class _Adaptable(torch.nn.Linear):
    """A linear layer whose weight may have a low-rank change beside it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        a, b = getattr(self, _A, None), getattr(self, _B, None)
        if a is None or b is None:
            return super().forward(input)  # bit for bit what diffusers computes
        return linear(input, Adapted(weight=self.weight, a=a, b=b), self.bias)


class _Weightless(TorchFunctionMode):
    """Tensors that wait for their numbers get no memory; what is computed, such as tables of positions, is."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") in _WITHOUT_NUMBERS:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _spread(params: Mapping[str, Weight]) -> dict[str, torch.Tensor]:
    """Plain tensors by name; the change of an adapted weight stands beside it."""
    found: dict[str, torch.Tensor] = {}
    for name, leaf in params.items():
        if not isinstance(leaf, Adapted):
            found[name] = leaf
            continue
        layer = name.removesuffix(".weight")
        found |= {name: leaf.weight, f"{layer}.{_A}": leaf.a, f"{layer}.{_B}": leaf.b}
    return found


def _class(name: str) -> Any:
    try:
        library = importlib.import_module("diffusers")
    except ModuleNotFoundError as error:
        raise ModelError(
            f"{name} is a module of diffusers, which is not installed; pip install 'areno-fn[flow]'"
        ) from error
    kind = getattr(library, name, None)
    if kind is None:
        raise ModelError(f"this version of diffusers has no {name}; pip install 'areno-fn[flow]' for one that has")
    return kind
