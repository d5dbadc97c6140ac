"""Every kernel against float64 autograd of its formula: the reference here, and Triton where there is no GPU.

On the CPU Triton kernels run in Triton's interpreter, which tests/conftest.py switches on where there is no GPU;
tests/gpu holds the same laws on one. Dynamo cannot trace what typeguard watches, so that compilation is checked in
a fresh interpreter: `python test_kernels.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.errors import KernelError
from areno_fn.kernels.add_rms_norm import cases as add_rms_norm_cases
from areno_fn.kernels.backend import BACKENDS, backend
from areno_fn.kernels.gated_gelu import cases as gated_gelu_cases
from areno_fn.kernels.gated_silu import cases as gated_silu_cases
from areno_fn.kernels.gated_silu import gated_silu
from areno_fn.kernels.law import Case, Cases, against_oracle, moving_tensors
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
from areno_fn.testing.kernels import fits_formula, makes_new_results, reads_spread_cotangents, same_under_transforms

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


def called(kernel: Cases) -> str:
    """The name of a kernel, and whether its entropies have a gradient."""
    return f"{kernel.name} entropic" if kernel in KERNELS[-3:] else kernel.name


def every_kernel(function: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("kernel", KERNELS, ids=called)(function)


def for_cases(function: Callable[[Cases, Case], None], kernel: Cases, examples: int) -> None:
    """The function over the kernel's search strategy; a fixture may stay in place between the examples."""
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.differing_executors]
    settings(max_examples=examples, deadline=None, suppress_health_check=health)(
        given(kernel.strategy)(lambda case: function(kernel, case))
    )()


# ---------------------------------------------------------------------------------------- the law of kernels


@every_kernel
def test_outputs_and_gradients_are_the_formulas(kernel: Cases, mode: str) -> None:
    for_cases(fits_formula, kernel, 100 if mode == "reference" else 40)


@every_kernel
def test_the_formulas_hold_across_tiles(kernel: Cases, mode: str) -> None:
    for case in kernel.wide:
        fits_formula(kernel, case)


@every_kernel
def test_torch_func_and_a_second_pull_give_the_same_bits_and_write_nothing(kernel: Cases, mode: str) -> None:
    for_cases(same_under_transforms, kernel, 25 if mode == "reference" else 10)


@every_kernel
def test_a_cotangent_of_stride_zero_is_read(kernel: Cases, mode: str) -> None:
    for_cases(reads_spread_cotangents, kernel, 10)


@every_kernel
def test_outputs_are_new_and_the_gradients_have_the_dtypes_of_the_inputs(kernel: Cases, mode: str) -> None:
    case = Case(
        sizes=(2, 3, 8) if len(kernel.hot[0].sizes) == 3 else (3, 8),
        dtype=torch.bfloat16,
        variant=kernel.hot[0].variant,
    )
    makes_new_results(kernel, case)


@every_kernel
def test_a_wrong_element_would_be_seen(kernel: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        sizes=(2, 3, 8) if len(kernel.hot[0].sizes) == 3 else (6, 8), dtype=torch.float32, variant=kernel.hot[0].variant
    )

    def faulty(*args: Any, **kwargs: Any) -> Any:
        result = kernel.function(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        wrong = first + 1e-4 * torch.nn.functional.one_hot(torch.tensor(0), first.numel()).reshape(first.shape)
        return (wrong, *result[1:]) if isinstance(result, tuple) else wrong

    assert all(d.fits for d in against_oracle(kernel, case, "cpu"))
    assert not all(d.fits for d in against_oracle(attrs.evolve(kernel, function=faulty), case, "cpu"))
    nan = attrs.evolve(kernel, function=lambda *a, **k: tree.map(lambda x: x * torch.nan, kernel.function(*a, **k)))
    assert not any(d.fits for d in against_oracle(nan, case, "cpu"))


# ---------------------------------------------------------------------------------------- which implementation runs


def test_the_device_decides() -> None:
    assert backend("rms_norm", torch.ones(1)) == "reference"
    assert BACKENDS == {"cpu": "reference", "cuda": "triton"}


def test_a_device_without_an_implementation_is_named() -> None:
    with pytest.raises(
        KernelError, match="rms_norm has no implementation for device meta; it has one for cpu and cuda"
    ):
        rms_norm(torch.ones(2, 3, device="meta"), torch.ones(3, device="meta"), 1e-6)
    with pytest.raises(KernelError, match="token_logp: all tensors must lie on one device, received meta and cpu"):
        token_logp(torch.ones(2, 3, device="meta"), torch.zeros(2, dtype=torch.int64))


def test_triton_is_not_imported_on_the_cpu() -> None:
    code = """
import sys, torch
from areno_fn.kernels.gated_silu import gated_silu
from areno_fn.kernels.rms_norm import rms_norm
from areno_fn.kernels.rotary import rotary
from areno_fn.kernels.token_logp import token_logp
x = torch.ones(2, 4, requires_grad=True)
rms_norm(x, torch.ones(4), 1e-6).sum().backward()
gated_silu(x).sum().backward()
rotary(x[:, None], torch.ones(2, 2), torch.ones(2, 2)).sum().backward()
token_logp(x, torch.zeros(2, dtype=torch.int64))[0].sum().backward()
print(*[name for name in ("triton", "hypothesis") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: rms_norm(torch.ones(2, 3), torch.ones(4), 1e-6),
            r"rms_norm: x must be floating \[..., D\] with D > 0 and weight floating \[D\], received float32 \[2, 3\], float32",
        ),
        (lambda: rms_norm(torch.ones(2, 0), torch.ones(0), 1e-6), r"D > 0 .* received float32 \[2, 0\]"),
        (lambda: rms_norm(torch.ones(2, 3, dtype=torch.int64), torch.ones(3), 1e-6), r"received int64 \[2, 3\]"),
        (
            lambda: gated_silu(torch.ones(2, 3)),
            r"gated_silu: gate_up must be floating \[..., 2 I\] with I > 0, received float32 \[2, 3\]",
        ),
        (lambda: gated_silu(torch.ones(2, 0)), r"received float32 \[2, 0\]"),
        (
            lambda: rotary(torch.ones(2, 1, 6), torch.ones(2, 4), torch.ones(2, 4)),
            r"rotary: x must be floating \[..., heads, head_dim\], head_dim even and > 0, cos and sin floating "
            r"\[..., R / 2\] with 0 < R <= head_dim, received float32 \[2, 1, 6\], float32 \[2, 4\], float32 \[2, 4\]",
        ),
        (lambda: rotary(torch.ones(2, 1, 4), torch.ones(3, 2), torch.ones(3, 2)), r"received .* float32 \[3, 2\]"),
        (lambda: rotary(torch.ones(2, 1, 3), torch.ones(2, 1), torch.ones(2, 1)), r"received float32 \[2, 1, 3\]"),
        (
            lambda: token_logp(torch.ones(2, 3), torch.zeros(3, dtype=torch.int64)),
            r"token_logp: logits must be floating \[M, V\] with V > 0 and targets int64 \[M\], received float32 \[2, 3\], int64",
        ),
        (lambda: token_logp(torch.ones(2, 3), torch.zeros(2, dtype=torch.int32)), r"int32 \[2\]"),
        (lambda: token_logp(torch.ones(0, 0), torch.zeros(0, dtype=torch.int64)), r"received float32 \[0, 0\]"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(KernelError, match=words):
        call()


# ---------------------------------------------------------------------------------------- one kernel at a time


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_like_transformers(dtype: torch.dtype) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    case = Case(sizes=(4, 7, 33), dtype=dtype)
    x, weight = case.normal("x", 4, 7, 33, device="cpu"), case.normal("w", 33, device="cpu")
    for layer, zero_centred in ((LlamaRMSNorm(33, eps=1e-5), False), (GemmaRMSNorm(33, eps=1e-5), True)):
        layer.weight.data = weight
        assert torch.equal(rms_norm(x, weight, 1e-5, zero_centred=zero_centred), layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_rounds_like_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    case = Case(sizes=(9, 5, 8), dtype=dtype)
    x = case.normal("x", 9, 5, 16, device="cpu")
    angles = case.normal("angles", 9, 8, device="cpu", dtype=torch.float32)
    wide = torch.cat((angles, angles), dim=-1)[None]
    want, _ = apply_rotary_pos_emb(
        x.transpose(0, 1)[None], x.transpose(0, 1)[None], wide.cos().to(dtype), wide.sin().to(dtype)
    )
    assert torch.equal(rotary(x, angles.cos(), angles.sin()), want[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_silu_rounds_like_transformers(dtype: torch.dtype) -> None:
    case = Case(sizes=(9, 5, 8), dtype=dtype)
    gate, up = case.normal("gate", 9, 40, device="cpu"), case.normal("up", 9, 40, device="cpu")
    got, want = gated_silu(torch.cat((gate, up), dim=-1)), torch.nn.functional.silu(gate) * up
    # torch's exponential of a row depends on how it lies in memory, by a rounding of float32
    torch.testing.assert_close(got, want, rtol=0 if dtype == torch.bfloat16 else 3e-7, atol=0)


def test_N1_a_zero_centred_weight_is_the_distance_from_one(mode: str) -> None:
    x, zeros = torch.tensor([[3.0, 4.0]]), torch.zeros(2)
    torch.testing.assert_close(rms_norm(x, zeros, 0.0, zero_centred=True), torch.tensor([[0.8485281, 1.1313708]]))
    assert torch.equal(rms_norm(x, zeros, 0.0), torch.zeros(1, 2))
    torch.testing.assert_close(rms_norm(x, torch.ones(2), 0.0), torch.tensor([[0.8485281, 1.1313708]]))


def test_O13_every_row_has_its_own_cotangent(mode: str) -> None:
    hidden, head, targets = (
        torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5]]),
        torch.eye(3, 2),
        torch.tensor([0, 2, 1]),
    )
    weight = torch.tensor([1.0, 3.0, 0.0])  # the third decision is ignored
    _, gradient = value_and_grad(lambda head: (token_logp(hidden @ head.T, targets)[0] * weight).sum())(head)
    want = torch.zeros(3, 2, dtype=torch.float64)
    for row, (x, target) in enumerate(zip(hidden.double(), targets, strict=True)):
        g = torch.nn.functional.one_hot(target, 3) - (x @ head.double().T).softmax(-1)
        want += weight[row] * g[:, None] * x[None]
    torch.testing.assert_close(gradient.double(), want, rtol=1e-6, atol=1e-6)


def test_truncated_logits_have_a_finite_entropy_and_no_gradient_where_they_are_closed(mode: str) -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf], [-torch.inf, -torch.inf, 5.0, -torch.inf]])
    logp, entropy = token_logp(logits, torch.tensor([2, 2]))
    torch.testing.assert_close(logp, torch.tensor([-0.6931472, 0.0]))
    torch.testing.assert_close(entropy, torch.tensor([0.6931472, 0.0]))
    gradient = value_and_grad(lambda x: token_logp(x, torch.tensor([2, 2]))[0].sum())(logits)[1]
    assert gradient.tolist() == [[-0.5, 0, 0.5, 0], [0, 0, 0, 0]]


def test_a_closed_target_and_a_closed_row_are_impossible_not_undefined(mode: str) -> None:
    logits = torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf]])
    targets = torch.tensor([1, 0])
    logp, entropy = token_logp(logits, targets)
    assert logp.tolist() == [-torch.inf, -torch.inf] and entropy.tolist() == [0, 0]
    gradient = torch.func.vjp(lambda x: token_logp(x, targets)[0], logits)[1](torch.ones(2))[0]
    assert gradient.tolist() == [[-1, 0], [0, 0]]


def test_what_is_not_a_number_stays_visible(mode: str) -> None:
    logits = torch.tensor([[0.0, torch.nan], [torch.inf, 0.0]])
    logp, entropy = token_logp(logits, torch.tensor([0, 1]))
    assert logp.isnan().all() and entropy.isnan().all()


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_a_shift_of_all_logits_changes_nothing(mode: str, shift: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0]]) + shift
    logp, entropy = token_logp(logits, torch.tensor([1]))
    torch.testing.assert_close(logp, torch.tensor([-2.1698461]))
    torch.testing.assert_close(entropy, torch.tensor([0.5242666]))


def test_the_entropy_has_no_gradient() -> None:
    logits = torch.ones(2, 3, requires_grad=True)
    logp, entropy = token_logp(logits, torch.tensor([0, 1]))
    assert logp.requires_grad and not entropy.requires_grad


def test_a_target_outside_the_vocabulary_is_an_error_or_nan() -> None:
    with pytest.raises((RuntimeError, IndexError), match="index 3 is out of bounds"):
        token_logp(torch.ones(1, 3), torch.tensor([3]))


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("target", [3, -1, -100])
def test_a_target_outside_the_vocabulary_is_nan_in_triton(target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "cpu", "triton")
    logp, entropy = token_logp(torch.ones(2, 3), torch.tensor([target, 0]))
    assert logp.isnan().tolist() == [True, False] and not entropy.isnan().any()


def test_interleaved_pairs_are_those_of_gpt_j_and_the_rest_stays(mode: str) -> None:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    case = Case(sizes=(9, 5, 8), dtype=torch.float32)
    x = case.normal("x", 9, 5, 24, device="cpu")
    angles = case.normal("angles", 9, 8, device="cpu")
    want = apply_rotary_pos_emb(x[None, ..., :16], angles.sin()[None], angles.cos()[None])[0]
    got = rotary(x, angles.cos(), angles.sin(), interleaved=True)
    torch.testing.assert_close(got[..., :16], want)
    assert torch.equal(got[..., 16:], x[..., 16:])


def test_rotary_is_linear_keeps_lengths_and_depends_on_distance_alone(mode: str) -> None:
    case = Case(sizes=(1,), dtype=torch.float64)
    q, k = case.normal("q", 1, 1, 16, device="cpu"), case.normal("k", 1, 1, 16, device="cpu")
    frequency = torch.logspace(0, -2, 8, dtype=torch.float64)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        angles = (position * frequency)[None]
        return rotary(x, angles.cos(), angles.sin())

    torch.testing.assert_close(at(q, 7).norm(), q.norm())
    torch.testing.assert_close((at(q, 9) * at(k, 4)).sum(), (at(q, 105) * at(k, 100)).sum())
    torch.testing.assert_close(at(q + 2 * k, 3), at(q, 3) + 2 * at(k, 3))
    assert torch.equal(at(q, 0), q)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_weights_gradient_of_rms_norm_covers_every_row_once(mode: str, rows: int) -> None:
    """More tiles than programs, so that a program sums several, the last of them ragged."""
    x = torch.ones(1000 * rows + 1, 1)
    _, gradient = value_and_grad(lambda w: rms_norm(x, w, 0.0).sum())(torch.ones(1))
    torch.testing.assert_close(gradient, torch.tensor([1000.0 * rows + 1]))


@pytest.mark.interpreted
def test_a_row_too_wide_for_the_registers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "cpu", "triton")
    with pytest.raises(
        KernelError,
        match=r"rms_norm: on the GPU the last dimension must be at most 65536, received float32 \[1, 65537\]",
    ):
        rms_norm(torch.ones(1, 65537), torch.ones(65537), 1e-6)


# ---------------------------------------------------------------------------------------- in a fresh interpreter


def alone(check: str, interpret: bool) -> list[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | (
        {"TRITON_INTERPRET": "1"} if interpret else {}
    )
    command = [sys.executable, __file__, check]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def test_gradients_compile_whole_on_every_implementation() -> None:
    assert alone("graphs", interpret=True) == [f"{k.name} {m}" for m in ("reference", "triton") for k in TRACED]


def test_every_triton_kernel_compiles_for_the_gpu() -> None:
    """To machine code of compute capability 9.0; Triton needs no GPU for that."""
    names = {line.split()[0] for line in alone("machine_code", interpret=False)}
    alike = {  # that have other parts, or share them
        "rotary",
        "gated_silu",
        "gated_gelu",
        "add_rms_norm",
        "linear_token_loss",
        "ordered_linear",
    }
    apart = {
        f"{k.name}.{part}" for k in KERNELS if k.name not in alike for part in ("_forward_kernel", "_backward_kernel")
    }
    shared = {"rotary._rotate_kernel", "launch._sum_kernel", "gates._forward_kernel", "gates._backward_kernel"}
    of_loss = {f"linear_token_loss._{part}_kernel" for part in ("turn", "scaled")}
    of_loss |= {f"linear_token_loss.powers._{part}_kernel" for part in ("anchor", "powers", "range", "close")}
    assert names == apart | shared | of_loss | {f"ordered_linear._{part}_kernel" for part in ("address", "described")}


def graphs() -> None:
    """`value_and_grad`, autograd and a plain call, each as one graph, equal eager bit for bit.

    With the second backend a graph holds the operators that stand for the Triton kernels.
    """
    for mode in ("reference", "triton"):
        BACKENDS["cpu"] = mode
        for kernel in TRACED:
            case = Case(sizes=(2, 3, 8) if len(kernel.hot[0].sizes) == 3 else (5, 8), dtype=torch.float32, strided=True)
            arguments = kernel.build(case, "cpu")
            static = [x for i, x in enumerate(arguments.positional) if i not in arguments.moving]

            def loss(
                moving: tuple[torch.Tensor, ...],
                *static: Any,
                kernel: Cases = kernel,
                keywords: Any = arguments.keywords,
            ) -> Any:
                result = kernel.function(*moving, *static, **keywords)
                return (result[0] if isinstance(result, tuple) else result).sin().sum()

            moving = tuple(moving_tensors(arguments))
            want = value_and_grad(loss)(moving, *static)
            for step, expected in ((value_and_grad(loss), want), (loss, want[0]), (torch.func.grad(loss), want[1])):
                torch._dynamo.reset()
                got = torch.compile(step, fullgraph=True, backend="aot_eager")(moving, *static)
                assert tree.first_difference(got, expected) is None
            torch._dynamo.reset()
            given = tuple(x.detach().requires_grad_() for x in moving)
            value = torch.compile(loss, fullgraph=True, backend="aot_eager")(given, *static)
            assert tree.first_difference(torch.autograd.grad(value, given), want[1]) is None
            print(kernel.name, mode)


def machine_code() -> None:
    """Compiles every launch of every kernel at several dtypes and sizes; sizes of 1 are constants, as at a launch."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    types = {
        torch.int32: "*i32",
        torch.float32: "*fp32",
        torch.bfloat16: "*bf16",
        torch.float64: "*fp64",
        torch.int64: "*i64",
    }

    def called(value: Any) -> str:
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{types[value.base.dtype][1:]}{list(value.block_shape)}>".replace(" ", "")
        return types[value.dtype] if isinstance(value, torch.Tensor) else "fp32" if isinstance(value, float) else "i32"

    class Launcher:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                parameters = {p.name: p.is_constexpr for p in self.kernel.params}
                values = dict(zip(parameters, args, strict=False))
                values |= {name: options.pop(name) for name in parameters if name in options}
                fixed = {n: v for n, v in values.items() if parameters[n] or (isinstance(v, int) and v == 1)}
                signature = {n: "constexpr" if n in fixed else called(v) for n, v in values.items()}
                source = ASTSource(fn=self.kernel, signature=signature, constexprs=fixed)
                done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
                print(self.name, len(done.asm["cubin"]))

            return launch

    parts = {f"{kernel.name}.triton": None for kernel in KERNELS}
    for place in ("launch", "gates", "linear_token_loss.powers", *parts):
        module = importlib.import_module(f"areno_fn.kernels.{place}")
        for name, value in list(vars(module).items()):
            if name.endswith("_kernel"):
                setattr(module, name, Launcher(f"{place.removesuffix('.triton')}.{name}", value))
    BACKENDS["cpu"] = "triton"
    for kernel in KERNELS:
        for dtype, last in ((torch.bfloat16, 64), (torch.float32, 33), (torch.float64, 1)):
            sizes = (1, 3, last) if len(kernel.hot[0].sizes) == 3 else (3, last)
            for variant in {c.variant for c in kernel.hot}:
                arguments = kernel.build(Case(sizes=sizes, dtype=dtype, variant=variant), "cpu")
                for i in arguments.moving:
                    arguments.positional[i].requires_grad_()
                result = kernel.function(*arguments.positional, **arguments.keywords)
                (result[0] if isinstance(result, tuple) else result).sum().backward()
    for kernel, sizes in ((linear_token_loss_cases.CASES, (3, 8, 64)), (ordered_linear_cases.CASES, (3, 8, 8))):
        arguments = kernel.build(Case(sizes=sizes, dtype=torch.bfloat16, variant=kernel.hot[0].variant), "cpu")
        kernel.function(*arguments.positional, **arguments.keywords)  # of rows that descriptors can stand for


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)  # Dynamo does it by itself
    warnings.filterwarnings("ignore", ".* encountered in", RuntimeWarning)
    {"graphs": graphs, "machine_code": machine_code}[sys.argv[1]]()
