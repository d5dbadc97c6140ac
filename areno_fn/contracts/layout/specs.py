"""What tensors must be: their shapes and dtypes, one by one and for a whole tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import attrs
import torch

from areno_fn.contracts.errors import LayoutError


def _shape(value: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(value, Iterable):
        raise LayoutError(f"a shape is a sequence of sizes, received {value!r}")
    return tuple(value)


@attrs.frozen
class TensorSpec:
    """What a tensor must be.

    Attributes:
        shape: its sizes.
        dtype: its dtype; None leaves it open.
    """

    shape: tuple[int, ...] = attrs.field(converter=_shape)
    dtype: torch.dtype | None = None

    def __attrs_post_init__(self) -> None:
        for size in self.shape:
            if type(size) is not int or size < 0:
                raise LayoutError(f"a shape holds integers of at least 0, received {self.shape}")

    @property
    def numel(self) -> int:
        """The number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def resized(self, dim: int, size: int) -> TensorSpec:
        """The same with another size along a dimension, counted from 0."""
        return TensorSpec((*self.shape[:dim], size, *self.shape[dim + 1 :]), self.dtype)

    def admits(self, tensor: torch.Tensor | TensorSpec) -> bool:
        """True when a tensor, or one that meets another specification, is what this one asks for."""
        return tuple(tensor.shape) == self.shape and self.dtype in (None, tensor.dtype)

    def __str__(self) -> str:
        name = "" if self.dtype is None else f"{str(self.dtype).removeprefix('torch.')} "
        return f"{name}{list(self.shape)}"


Tensors = Mapping[str, torch.Tensor]
Specs = Mapping[str, TensorSpec]
Move = Callable[[Tensors], dict[str, torch.Tensor]]


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The specification that exactly this tensor's shape and dtype meet."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


@attrs.frozen
class ParamLayout:
    """The leaves that a parameter tree must have, by dotted path."""

    leaves: Specs

    def differences(self, given: Tensors | Specs) -> list[str]:
        """Everything in which `given` is not what is declared, a phrase each; empty when it is."""
        missing = [f"{name!r} is missing" for name in self.leaves if name not in given]
        unknown = [f"{name!r} is not declared" for name in given if name not in self.leaves]
        wrong = [
            f"{name!r} is {_shown(value)}, declared {self.leaves[name]}"
            for name, value in given.items()
            if name in self.leaves and not (_is_known(value) and self.leaves[name].admits(value))
        ]
        return missing + unknown + wrong

    def check(self, given: Tensors | Specs, what: str = "the tensors given") -> None:
        """Refuses tensors that are not the declared ones.

        Raises:
            LayoutError: lists every missing, undeclared or wrong tensor.
        """
        found = self.differences(given)
        if found:
            raise LayoutError(f"{what} do not fit the layout: {'; '.join(found)}")


def _is_known(value: object) -> bool:
    return isinstance(value, torch.Tensor | TensorSpec)


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return str(spec_of(value))
    return str(value) if isinstance(value, TensorSpec) else f"a {type(value).__name__}"
