"""The fused AdamW update against `torch.optim.AdamW` in float64, on both implementations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areno_fn.contracts.errors import KernelError
from areno_fn.kernels.adamw import Factors, Updated, adamw_update, adamw_update_in_place
from areno_fn.kernels.backend import BACKENDS

BETAS, EPS, RATE, CLIP = (0.9, 0.95), 1e-8, 3e-3, 0.25
SHAPES = st.lists(
    st.sampled_from([(), (1,), (3, 5), (4096,), (4097,), (0,), (2, 3, 700), (40_000,)]), min_size=1, max_size=5
)


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.interpreted)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation that runs on the CPU."""
    monkeypatch.setitem(BACKENDS, "cpu", request.param)
    return "cpu"


def numbers(shape: tuple[int, ...], seed: int, strided: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.unsqueeze(-1).expand(*shape, 2).contiguous()[..., 0] if strided else x


def updated(
    gradients: list[torch.Tensor], state: list[list[torch.Tensor]], decay: list[float], step: int, stored: torch.dtype
) -> Updated:
    number = torch.tensor
    factors = Factors(number(CLIP), number(RATE), number(1 - BETAS[0] ** step), number(1 - BETAS[1] ** step))
    return adamw_update(gradients, *state, stored, decay, factors, BETAS, EPS)


@given(shapes=SHAPES, strided=st.booleans(), low=st.booleans(), stored=st.sampled_from([torch.bfloat16, torch.float32]))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_updates_are_those_of_torch_in_float64(
    device: str, shapes: list[tuple[int, ...]], strided: bool, low: bool, stored: torch.dtype
) -> None:
    begin = [numbers(shape, i, strided) for i, shape in enumerate(shapes)]
    decay = [0.1 if len(shape) > 1 else 0.0 for shape in shapes]
    exact = [x.double().clone().requires_grad_() for x in begin]
    groups = [{"params": [x], "weight_decay": d} for x, d in zip(exact, decay, strict=True)]
    peer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)
    state = [begin, [torch.zeros_like(x) for x in begin], [torch.zeros_like(x) for x in begin]]
    for step in (1, 2, 3):
        gradients = [
            numbers(s, 10 * step + i, strided, torch.bfloat16 if low else torch.float32) for i, s in enumerate(shapes)
        ]
        before = [x.clone() for leaves in (gradients, *state) for x in leaves]
        new = updated(gradients, state, decay, step, stored)
        for a, b in zip([x for leaves in (gradients, *state) for x in leaves], before, strict=True):
            assert torch.equal(a, b)
        state = [new.master, new.mu, new.nu]
        for x, g in zip(exact, gradients, strict=True):
            x.grad = g.double() * CLIP
        peer.step()
        for got, stored_leaf, want in zip(new.master, new.stored, exact, strict=True):
            torch.testing.assert_close(got.double(), want.detach(), rtol=2e-6, atol=2e-7)
            # Triton's interpreter cuts a number off where the compiler and torch round it
            torch.testing.assert_close(stored_leaf.float(), got, rtol=torch.finfo(stored).eps, atol=0)
            assert stored_leaf.dtype == stored and got.shape == stored_leaf.shape == want.shape


@given(shapes=SHAPES, kind=st.sampled_from(["masters", "stored", "float32"]))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_in_place_gives_the_same_bits_where_the_old_ones_were(
    device: str, shapes: list[tuple[int, ...]], kind: str
) -> None:
    own = torch.bfloat16 if kind == "stored" else torch.float32
    stored = torch.float32 if kind == "float32" else torch.bfloat16
    master, mu, nu = ([numbers(s, 100 * n + i, False, own) for i, s in enumerate(shapes)] for n in range(3))
    state = [master, mu, [x.abs() for x in nu]]
    gradients = [numbers(s, 7 + i, False, torch.bfloat16) for i, s in enumerate(shapes)]
    decay = [0.1] * len(shapes)
    want = updated(gradients, state, decay, 3, stored)
    number = torch.tensor
    factors = Factors(number(CLIP), number(RATE), number(1 - BETAS[0] ** 3), number(1 - BETAS[1] ** 3))
    kept = master if stored == own else [torch.empty_like(x, dtype=stored) for x in master]
    versions = [x._version for leaves in (*state, kept) for x in leaves]
    adamw_update_in_place(gradients, *state, kept, decay, factors, BETAS, EPS)
    for got, expected in zip((*state, kept), want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    after = [x._version for leaves in (*state, kept) for x in leaves]
    assert all(a > b for a, b in zip(after, versions, strict=True))


@pytest.mark.parametrize("steps", [1, 3])
def test_stored_states_are_those_of_torch_rounded_once_a_step(device: str, steps: int) -> None:
    """Against float64 from the same bfloat16 states: every number is within half a place of it, two where bits are cut."""
    begin = [numbers((64, 33), 0, False, torch.bfloat16)]
    state = [begin, [torch.zeros_like(begin[0])], [torch.zeros_like(begin[0])]]
    for step in range(1, steps + 1):
        gradient = numbers((64, 33), step, False, torch.bfloat16)
        p, m, n = (leaves[0].double() for leaves in state)
        g = gradient.double() * CLIP
        m, n = m * BETAS[0] + g * (1 - BETAS[0]), n * BETAS[1] + g * g * (1 - BETAS[1])
        root = (n / (1 - BETAS[1] ** step)).sqrt() + EPS
        p = p - RATE * (m / (1 - BETAS[0] ** step) / root + 0.1 * p)
        new = updated([gradient], state, [0.1], step, torch.bfloat16)
        for got, want in zip(new[:3], (p, m, n), strict=True):
            assert got[0].dtype == torch.bfloat16
            torch.testing.assert_close(got[0].double(), want, rtol=2**-7, atol=1e-12)
        assert new.stored[0] is new.master[0]
        state = [new.master, new.mu, new.nu]


def test_what_is_not_contiguous_is_not_updated_in_place() -> None:
    x, number = torch.ones(4, 4), torch.tensor
    factors = Factors(number(1.0), number(0.1), number(0.1), number(0.1))
    with pytest.raises(
        KernelError, match=r"adamw: what is updated in place must be contiguous, received float32 \[4, 4\]"
    ):
        adamw_update_in_place([x], [x.clone().t()], [x], [x.clone()], [x.clone()], [0.0], factors, BETAS, EPS)


def test_leaves_that_do_not_fit_are_refused() -> None:
    one, other = [torch.ones(3)], [torch.ones(4)]
    with pytest.raises(
        KernelError, match=r"adamw: gradients must share a floating dtype, and .* received float32 \[3\]"
    ):
        updated(one, [other, one, one], [0.0], 1, torch.float32)
    with pytest.raises(KernelError, match="or be all in the dtype of the parameters, received float32"):
        updated(one, [[torch.ones(3, dtype=torch.float64)], one, one], [0.0], 1, torch.float32)


def test_nothing_is_updated_to_nothing() -> None:
    assert updated([], [[], [], []], [], 1, torch.float32) == Updated([], [], [], [])
