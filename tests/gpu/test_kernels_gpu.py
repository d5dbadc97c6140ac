"""The laws of tests/property/test_kernels.py on a CUDA device, and what only a device can show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.errors import KernelError
from areno_fn.kernels.add_rms_norm import cases as add_rms_norm_cases
from areno_fn.kernels.gated_gelu import cases as gated_gelu_cases
from areno_fn.kernels.gated_silu import cases as gated_silu_cases
from areno_fn.kernels.gated_silu import gated_silu
from areno_fn.kernels.law import (
    Arguments,
    Case,
    Cases,
    against_oracle,
    answering,
    cotangents_of,
    moving_tensors,
    pulled,
)
from areno_fn.kernels.linear_token_logp import cases as linear_token_logp_cases
from areno_fn.kernels.linear_token_loss import cases as linear_token_loss_cases
from areno_fn.kernels.norm_rotary import cases as norm_rotary_cases
from areno_fn.kernels.ordered_linear import cases as ordered_linear_cases
from areno_fn.kernels.rms_norm import cases as rms_norm_cases
from areno_fn.kernels.rms_norm import rms_norm
from areno_fn.kernels.rotary import cases as rotary_cases
from areno_fn.kernels.rotary import rotary
from areno_fn.kernels.token_logp import cases as token_logp_cases
from areno_fn.kernels.token_logp import token_logp

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
KERNELS = [
    rms_norm_cases.CASES,
    add_rms_norm_cases.CASES,
    gated_silu_cases.CASES,
    gated_gelu_cases.CASES,
    rotary_cases.CASES,
    norm_rotary_cases.CASES,
    token_logp_cases.CASES,
    linear_token_logp_cases.CASES,
    ordered_linear_cases.CASES,
    linear_token_loss_cases.CASES,
    token_logp_cases.ENTROPIC,
    linear_token_logp_cases.ENTROPIC,
    linear_token_loss_cases.ENTROPIC,
]
TRACED = [kernel for kernel in KERNELS if kernel.name != "linear_token_loss"]
"""A function that is an argument has no place in a graph."""
LOW = ("ordered_linear",)
"""Kernels that a GPU has for 16 bits alone."""


def called(kernel: Cases) -> str:
    """The name of a kernel, and whether its entropies have a gradient."""
    return f"{kernel.name} entropic" if kernel in KERNELS[-3:] else kernel.name


HOT = [pytest.param(k, c, id=f"{called(k)}-{'x'.join(map(str, c.sizes))}-{c.variant}") for k in KERNELS for c in k.hot]

every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=called)
every_hot_case = pytest.mark.parametrize(("kernel", "case"), HOT)


def for_cases(function: Callable[[Cases, Case], None], kernel: Cases, examples: int) -> None:
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.differing_executors]
    settings(max_examples=examples, deadline=None, suppress_health_check=health)(
        given(kernel.strategy)(lambda case: function(kernel, case))
    )()


def small(kernel: Cases, last: int = 64, dtype: torch.dtype = torch.bfloat16) -> Case:
    hot = kernel.hot[0]
    sizes = (3, 5, last) if len(hot.sizes) == 3 else (15, last)
    return Case(sizes=sizes, dtype=dtype, variant=hot.variant, strided=True)


# ---------------------------------------------------------------------------------------- the law of kernels


def fits(kernel: Cases, case: Case) -> None:
    differences = against_oracle(kernel, case, DEVICE)
    assert [d for d in differences if not d.fits] == []


@every_kernel
def test_outputs_and_gradients_are_the_formulas(kernel: Cases, poisoned_memory: None) -> None:
    for_cases(fits, kernel, 20)


@every_kernel
def test_the_formulas_hold_across_tiles(kernel: Cases, poisoned_memory: None) -> None:
    for case in kernel.wide:
        fits(kernel, case)


@every_hot_case
def test_the_formulas_hold_where_training_runs(kernel: Cases, case: Case, poisoned_memory: None) -> None:
    fits(kernel, case)
    torch.cuda.empty_cache()


@every_hot_case
def test_equal_inputs_give_equal_bits(kernel: Cases, case: Case) -> None:
    arguments = kernel.build(case, DEVICE)
    cotangents = cotangents_of(kernel, case, arguments)
    first = pulled(kernel.function, arguments, kernel.answered, cotangents)
    second = pulled(kernel.function, arguments, kernel.answered, cotangents)
    for a, b in zip(tree.leaves(first), tree.leaves(second), strict=True):
        assert torch.equal(a, b)
    torch.cuda.empty_cache()


@every_kernel
def test_torch_func_and_a_second_pull_give_the_same_bits_and_write_nothing(kernel: Cases) -> None:
    case = small(kernel)
    arguments = kernel.build(case, DEVICE)
    before = [x.clone() for x in arguments.positional if isinstance(x, torch.Tensor)]
    cotangents = cotangents_of(kernel, case, arguments)
    outputs, gradients = pulled(kernel.function, arguments, kernel.answered, cotangents)
    values, pull = torch.func.vjp(answering(kernel, arguments), *moving_tensors(arguments))
    assert tree.first_difference(values, tuple(outputs[i] for i in kernel.answered)) is None
    assert tree.first_difference(pull(cotangents), gradients) is None
    assert tree.first_difference(pull(cotangents), gradients) is None
    assert tree.first_difference([x for x in arguments.positional if isinstance(x, torch.Tensor)], before) is None


def summed(kernel: Cases, arguments: Arguments) -> Callable[[tuple[torch.Tensor, ...]], torch.Tensor]:
    return lambda moving: torch.stack([x.float().sin().sum() for x in answering(kernel, arguments)(*moving)]).sum()


# ---------------------------------------------------------------------------------------- what only a device can show


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_kernel
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_the_host_never_waits(kernel: Cases) -> None:
    arguments = kernel.build(small(kernel), DEVICE)
    step = value_and_grad(summed(kernel, arguments))
    step(tuple(moving_tensors(arguments)))  # compiles
    with waiting_is_an_error():
        step(tuple(moving_tensors(arguments)))


@pytest.mark.parametrize("kernel", TRACED, ids=called)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore")
def test_gradients_compile_whole(kernel: Cases, backend: str) -> None:
    dtype = torch.bfloat16 if kernel.name in LOW else torch.float32
    arguments = kernel.build(small(kernel, dtype=dtype), DEVICE)
    moving = tuple(moving_tensors(arguments))
    loss = summed(kernel, arguments)
    want = value_and_grad(loss)(moving)
    torch._dynamo.reset()
    got = torch.compile(value_and_grad(loss), fullgraph=True, backend=backend)(moving)
    close(got, want)
    given = tuple(x.detach().requires_grad_() for x in moving)
    value = torch.compile(loss, fullgraph=True, backend=backend)(given)
    close(torch.autograd.grad(value, given), want[1])


def close(got: Any, want: Any) -> None:
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        near = 1e-5 if a.dtype == torch.float32 else 2e-2  # a sine's cotangent is rounded in another place
        torch.testing.assert_close(a, b, rtol=near, atol=near)


@every_kernel
def test_a_step_is_captured_in_a_cuda_graph(kernel: Cases) -> None:
    arguments = kernel.build(small(kernel), DEVICE)
    moving = tuple(moving_tensors(arguments))
    step = value_and_grad(summed(kernel, arguments))
    want = step(moving)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(moving)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(moving)
    for x in tree.leaves(got):
        x.fill_(torch.nan)
    graph.replay()
    assert tree.first_difference(got, want) is None


BEYOND = 2**31
"""Elements that a 32-bit offset does not reach."""


@pytest.mark.parametrize(
    ("name", "width"), [("rms_norm", 1024), ("gated_silu", 6144), ("rotary", 2048), ("token_logp", 151936)]
)
def test_offsets_have_64_bits(name: str, width: int) -> None:
    """The last rows of a tensor of more than 2^31 elements are treated as they are alone."""
    rows = BEYOND // width + 5
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device=DEVICE)
    last = Case(sizes=(4, width), dtype=torch.bfloat16).normal("last", 4, width, device=DEVICE)
    x[-4:] = last

    def apply(x: torch.Tensor) -> torch.Tensor:
        if name == "rms_norm":
            return rms_norm(x, torch.ones(width, dtype=x.dtype, device=DEVICE), 1e-6)
        if name == "gated_silu":
            return gated_silu(x)
        if name == "rotary":
            angles = torch.ones(x.shape[0], 64, device=DEVICE)
            return rotary(x.view(-1, width // 128, 128), angles.cos(), angles.sin()).view(-1, width)
        return token_logp(x, torch.full((x.shape[0],), width - 1, device=DEVICE))[0]

    value, pull = torch.func.vjp(apply, x)
    alone, pull_alone = torch.func.vjp(apply, last)
    assert torch.equal(value[-4:], alone)
    cotangent = torch.zeros_like(value)
    cotangent[-4:] = alone
    (got,) = pull(cotangent, retain_graph=False, create_graph=False)
    assert torch.equal(got[-4:], pull_alone(alone)[0])
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotary_has_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    case = Case(sizes=(33, 7, 64), dtype=dtype)
    given = rotary_cases.CASES.build(case, "cpu").positional
    assert torch.equal(rotary(*(x.to(DEVICE) for x in given)).cpu(), rotary(*given))


@pytest.mark.parametrize("target", [7, -1, -100])
def test_a_target_outside_the_vocabulary_is_nan(target: int) -> None:
    logp, entropy = token_logp(torch.ones(2, 7, device=DEVICE), torch.tensor([target, 0], device=DEVICE))
    assert logp.isnan().tolist() == [True, False] and not entropy.isnan().any()


def test_N1_a_zero_centred_weight_is_the_distance_from_one() -> None:
    x, zeros = torch.tensor([[3.0, 4.0]], device=DEVICE), torch.zeros(2, device=DEVICE)
    want = torch.tensor([[0.8485281, 1.1313708]], device=DEVICE)
    torch.testing.assert_close(rms_norm(x, zeros, 0.0, zero_centred=True), want)
    assert torch.equal(rms_norm(x, zeros, 0.0), torch.zeros(1, 2, device=DEVICE))


def test_tensors_on_several_devices_are_refused() -> None:
    with pytest.raises(KernelError, match="rms_norm: all tensors must lie on one device, received cuda:0 and cpu"):
        rms_norm(torch.ones(2, 3, device="cuda:0"), torch.ones(3), 1e-6)


def test_a_row_too_wide_for_the_registers_is_refused() -> None:
    with pytest.raises(KernelError, match="rms_norm: on the GPU the last dimension must be at most 65536"):
        rms_norm(torch.ones(1, 65537, device=DEVICE), torch.ones(65537, device=DEVICE), 1e-6)


@every_kernel
def test_a_kernel_runs_where_its_tensors_lie(kernel: Cases) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    case = small(kernel)
    results = []
    for device in ("cuda:0", "cuda:1"):
        arguments = kernel.build(case, device)
        results.append(pulled(kernel.function, arguments, kernel.answered, cotangents_of(kernel, case, arguments)))
    for a, b in zip(tree.leaves(results[0]), tree.leaves(results[1]), strict=True):
        assert torch.equal(a.cpu(), b.cpu())
