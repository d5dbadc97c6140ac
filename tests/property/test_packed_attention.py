"""Packed attention with windows and soft caps against float64 autograd of its formula, here and in Triton's interpreter."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rounded_attention import cut_off, errors

from areno_fn import tree
from areno_fn.contracts.errors import KernelError
from areno_fn.kernels.attention import equal_documents, packed_attention, packed_layout, pull
from areno_fn.kernels.attention import triton as triton_part
from areno_fn.kernels.attention.cases import CASES, build, oracle
from areno_fn.kernels.law import Case, against_oracle, cotangents_of, moving_tensors, pulled


def _fits(case: Case) -> None:
    assert [d for d in against_oracle(CASES, case, "cpu") if not d.fits] == []


def test_outputs_and_gradients_are_the_formulas(mode: str) -> None:
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.differing_executors]
    settings(max_examples=25 if mode == "reference" else 10, deadline=None, suppress_health_check=health)(
        given(CASES.strategy)(_fits)
    )()


def test_the_formulas_hold_across_tiles(mode: str) -> None:
    for case in CASES.wide:
        _fits(case)


@given(
    case=CASES.strategy,
    sizes=st.tuples(*[st.sampled_from([16, 32, 64])] * 4),
    apart=st.booleans(),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def _tiles_of_any_size(case: Case, sizes: tuple[int, ...], apart: bool) -> None:
    queries, keys, few, many = sizes
    steps = triton_part.Blocks(queries, keys, 4, 1), triton_part.Blocks(min(few, queries), many, 4, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_part, "forward_blocks", lambda *_: steps[0])
        patch.setattr(pull, "queries_blocks", lambda *_: steps[0])
        patch.setattr(pull, "keys_blocks", lambda *_: pull.KeyBlocks(steps[1], apart))
        _fits(attrs.evolve(case, sizes=(*case.sizes[:3], *(3 * n for n in case.sizes[3:]))))


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("mode", ["triton"], indirect=True)
def test_the_formulas_hold_for_tiles_of_any_size(mode: str) -> None:
    _tiles_of_any_size()


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("mode", ["triton"], indirect=True)
@pytest.mark.parametrize("cap", [30, 50])
def test_peaked_weights_are_as_exact_as_a_rounded_result_lets_them_be(cap: int, mode: str) -> None:
    drawn = [
        Case(sizes=(1, 2, 256, 96, 40), dtype=torch.bfloat16, variant=f"cap {cap}", magnitude=100.0, seed=seed)
        for seed in range(4)
    ]
    ours, plain, exact = torch.stack([errors(case, "cpu", cut_off) for case in drawn]).mean(0).sqrt()
    assert (ours < 1.1 * plain).all(), (ours, plain)
    # what is left in the gradients of queries and keys is the rounding of the result, which the backward is given
    assert (exact[1:3] < 0.5 * plain[1:3]).all(), (exact, plain)


def test_torch_func_and_a_second_pull_give_the_same_bits_and_write_nothing(mode: str) -> None:
    case = Case(sizes=(2, 2, 16, 21, 9), dtype=torch.bfloat16, variant="window 6 cap 3", strided=True)
    arguments = build(case, "cpu")
    before = [x.clone() for x in moving_tensors(arguments)]
    cotangents = cotangents_of(CASES, case, arguments)
    outputs, gradients = pulled(CASES.function, arguments, (0,), cotangents)
    rest = arguments.positional[3:]
    value, pull = torch.func.vjp(
        lambda *x: packed_attention(*x, *rest, **arguments.keywords), *moving_tensors(arguments)
    )
    assert torch.equal(value, outputs[0])
    assert tree.first_difference(pull(*cotangents), gradients) is None
    assert tree.first_difference(pull(*cotangents), gradients) is None
    assert tree.first_difference(list(moving_tensors(arguments)), before) is None


def test_a_window_is_what_is_seen_and_a_large_cap_bends_nothing(mode: str) -> None:
    case = Case(sizes=(1,), dtype=torch.float32)
    q, k, v = (case.normal(name, 9, 1, 4, device="cpu") for name in "qkv")
    layout = equal_documents(1, 9)
    alone = packed_attention(q, k, v, layout, 0.5, window=1)
    assert torch.equal(alone, v)
    wide = packed_attention(q, k, v, layout, 0.5, window=9)
    torch.testing.assert_close(wide, packed_attention(q, k, v, layout, 0.5))
    torch.testing.assert_close(packed_attention(q, k, v, layout, 0.5, soft_cap=1e4), wide, rtol=1e-4, atol=1e-4)
    # two keys: a score of 3 under a cap of 1 weighs as tanh(3)
    two = torch.tensor([[[0.0]], [[3.0]]])
    keys, values = torch.tensor([[[0.0]], [[1.0]]]), torch.tensor([[[0.0]], [[1.0]]])
    got = packed_attention(two, keys, values, equal_documents(1, 2), 1.0, soft_cap=1.0)[1].item()
    assert got == pytest.approx(1 / (1 + 2.718281828**-0.9950547537), rel=1e-5)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_a_scale_that_is_not_positive_weighs_as_the_formula(mode: str, scale: float) -> None:
    case = Case(sizes=(1,), dtype=torch.float32)
    q, k, v = (case.normal(name, 40, 1, 4, device="cpu") for name in "qkv")
    got = packed_attention(q, k, v, equal_documents(1, 40), scale, window=7)
    exact = oracle(*(x.double() for x in (q, k, v)), equal_documents(1, 40), scale, 7, 0.0)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_document_does_not_change_a_bit_of_another(mode: str) -> None:
    case = Case(sizes=(1,), dtype=torch.float32)
    q, k, v = (case.normal(name, 12, 2, 8, device="cpu") for name in "qkv")
    segments = torch.tensor([0] * 5 + [1] * 7)

    def first(other: float) -> torch.Tensor:
        changed = [torch.cat((x[:5], torch.full_like(x[5:], other))) for x in (q, k, v)]
        return packed_attention(*changed, packed_layout(segments), 0.3, window=4, soft_cap=2.0)[:5]

    assert torch.equal(first(1.0), first(-30.0))


def test_negative_bounds_are_refused() -> None:
    x = torch.ones(2, 1, 4)
    with pytest.raises(KernelError, match="packed_attention: window and soft_cap must not be negative"):
        packed_attention(x, x, x, equal_documents(1, 2), 1.0, window=-1)
