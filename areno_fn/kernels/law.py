"""What the `cases.py` of a kernel says, and the law that every kernel obeys.

One description of inputs serves the property tests, the tests on the GPU and the benchmarks. A kernel is
judged against its formula in float64, differentiated by autograd, never against itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from areno_fn import random
from areno_fn.contracts.key import Key


@attrs.frozen(kw_only=True)
class Case:
    """Inputs of a kernel as a value, so that a failing one can be written down.

    Attributes:
        sizes: the dimensions, in the order that the kernel's `cases.py` names.
        dtype: of the floating inputs.
        strided: inputs are views, neither contiguous nor dense.
        magnitude: standard deviation of the main input.
        variant: a choice that the kernel's `cases.py` names.
        seed: of the draws.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype
    strided: bool = False
    magnitude: float = 1.0
    variant: str = ""
    seed: int = 0

    def normal(
        self, name: str, *shape: int, device: torch.device | str, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Standard normal numbers that depend on the name."""
        values = torch.empty(math.prod(shape), dtype=dtype or self.dtype, device=device)
        key = Key.of(self.seed).fold(name)
        for start in range(0, values.numel(), _CHUNK):
            where = torch.arange(start, min(start + _CHUNK, values.numel()), device=device)
            values[start : start + _CHUNK] = random.normal(key, where)
        return values.reshape(shape)

    def lay(self, values: torch.Tensor) -> torch.Tensor:
        """The same numbers; in a strided case with the first two dimensions swapped in memory and NaN in the gaps."""
        if not self.strided or values.ndim == 0:
            return values
        turned = values.transpose(0, 1) if values.ndim > 1 else values
        memory = turned.new_full((*turned.shape[:-1], 2 * turned.shape[-1] + 1), torch.nan)
        view = memory[..., 1::2]
        view.copy_(turned)
        return view.transpose(0, 1) if values.ndim > 1 else view


_CHUNK = 1 << 24


@attrs.frozen(kw_only=True)
class Arguments:
    """Arguments of a kernel's public function.

    Attributes:
        positional: in order; tensors and static values.
        moving: positions of the tensors that have a gradient.
        keywords: static values.
    """

    positional: tuple[Any, ...]
    moving: tuple[int, ...]
    keywords: dict[str, Any] = attrs.Factory(dict)


@attrs.frozen(kw_only=True)
class Floor:
    """The least that any implementation must do on one case.

    Attributes:
        bytes: moved between memory and processor: every input read once, every output written once.
        flops: floating operations, an exponential counted as one.
    """

    bytes: int
    flops: int


@attrs.frozen(kw_only=True)
class Cases:
    """Everything that is known about one kernel.

    Attributes:
        name: the folder.
        function: the public function.
        oracle: its formula in plain torch on float64 arguments, differentiable by autograd.
        answered: positions of the outputs through which the gradient flows.
        build: `(case, device) -> Arguments`.
        strategy: hypothesis's search strategy over small cases.
        wide: cases that a search over small ones does not reach: more than one tile in every direction.
        hot: the shapes that training runs at.
        tolerance: `(dtype of the inputs, dtype of a result) -> relative error` that rounding explains.
        noise: `(float64 arguments, float64 cotangents) -> magnitudes`, one for each output and then for each
            gradient: the size of the terms whose sum it is, where they may cancel; 0 where they cannot.
        forward_floor: of a case.
        backward_floor: of a case.
    """

    name: str
    function: Callable[..., Any]
    oracle: Callable[..., Any]
    answered: tuple[int, ...]
    build: Callable[[Case, Any], Arguments]
    strategy: Any
    wide: tuple[Case, ...]
    hot: tuple[Case, ...]
    tolerance: Callable[[torch.dtype, torch.dtype], float]
    noise: Callable[[Arguments, tuple[torch.Tensor, ...]], tuple[float, ...]]
    forward_floor: Callable[[Case], Floor]
    backward_floor: Callable[[Case], Floor]


def coarser(inputs: torch.dtype, result: torch.dtype) -> float:
    """Four roundings in the coarser of the dtypes of the inputs and of a result."""
    return 4 * max(torch.finfo(inputs).eps, torch.finfo(result).eps)


def size_of(x: torch.Tensor) -> float:
    """The root of the mean square of all elements; 0 where there are none."""
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def of_result(inputs: torch.dtype, result: torch.dtype) -> float:
    """Four roundings in the dtype of a result, whatever the inputs are."""
    del inputs
    return 4 * torch.finfo(result).eps


@attrs.frozen(kw_only=True)
class Difference:
    """One result of a kernel against the oracle.

    Attributes:
        label: `output 0`, `gradient of argument 1`.
        error: root mean square of the difference over the finite elements; infinite when others differ.
        allowed: the most that rounding explains.
    """

    label: str
    error: float
    allowed: float

    @property
    def fits(self) -> bool:
        """Whether rounding explains it; never for NaN."""
        return self.error <= self.allowed


def against_oracle(cases: Cases, case: Case, device: torch.device | str) -> list[Difference]:
    """Every output and every gradient of the public function against float64 autograd of the oracle."""
    arguments = cases.build(case, device)
    cotangents = cotangents_of(cases, case, arguments)
    wide = _doubled(arguments)
    outputs, gradients = pulled(cases.function, arguments, cases.answered, cotangents)
    wanted, wanted_gradients = pulled(cases.oracle, wide, cases.answered, tuple(c.double() for c in cotangents))
    noise = cases.noise(wide, tuple(c.double() for c in cotangents))
    labels = [f"output {i}" for i in range(len(outputs))] + [f"gradient of argument {i}" for i in arguments.moving]
    pairs = zip(labels, (*outputs, *gradients), (*wanted, *wanted_gradients), noise, strict=True)
    return [
        _difference(label, got, want, size, cases.tolerance(case.dtype, got.dtype)) for label, got, want, size in pairs
    ]


def pulled(
    function: Callable[..., Any], arguments: Arguments, answered: tuple[int, ...], cotangents: tuple[torch.Tensor, ...]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Outputs and gradients by plain autograd."""
    given = list(arguments.positional)
    for i in arguments.moving:
        given[i] = given[i].detach().requires_grad_()
    outputs = function(*given, **arguments.keywords)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = torch.autograd.grad([outputs[i] for i in answered], [given[i] for i in arguments.moving], cotangents)
    return tuple(x.detach() for x in outputs), gradients


def cotangents_of(cases: Cases, case: Case, arguments: Arguments) -> tuple[torch.Tensor, ...]:
    """Normal cotangents for the outputs through which the gradient flows."""
    with torch.no_grad():
        outputs = cases.function(*arguments.positional, **arguments.keywords)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    chosen = [outputs[i] for i in cases.answered]
    return tuple(
        case.lay(case.normal(f"cotangent {i}", *x.shape, device=x.device, dtype=x.dtype)) for i, x in enumerate(chosen)
    )


def moving_tensors(arguments: Arguments) -> Iterator[torch.Tensor]:
    """The arguments that have a gradient."""
    return (arguments.positional[i] for i in arguments.moving)


def answering(cases: Cases, arguments: Arguments) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The kernel as a function of the arguments that have a gradient, to the outputs through which it flows."""

    def function(*moving: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(arguments.positional)
        for i, x in zip(arguments.moving, moving, strict=True):
            given[i] = x
        result = cases.function(*given, **arguments.keywords)
        result = result if isinstance(result, tuple) else (result,)
        return tuple(result[i] for i in cases.answered)

    return function


def _doubled(arguments: Arguments) -> Arguments:
    positional = tuple(
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments.positional
    )
    return attrs.evolve(arguments, positional=positional)


def _difference(label: str, got: torch.Tensor, want: torch.Tensor, noise: float, tolerance: float) -> Difference:
    finite = want.isfinite()
    if got.shape != want.shape or not torch.equal(got[~finite].double(), want[~finite]):
        return Difference(label=label, error=math.inf, allowed=0.0)
    if not finite.any():
        return Difference(label=label, error=0.0, allowed=0.0)
    error = size_of((got.double() - want)[finite])
    size = max(noise, size_of(want[finite]))
    return Difference(label=label, error=error, allowed=tolerance * size + torch.finfo(got.dtype).tiny)
