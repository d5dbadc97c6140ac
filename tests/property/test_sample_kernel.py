"""`sample` against its definition in float64: the reference here, and Triton in its interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from areno_fn.contracts.errors import KernelError
from areno_fn.contracts.key import Key
from areno_fn.kernels.backend import BACKENDS
from areno_fn.kernels.law import Case
from areno_fn.kernels.sample import cases, sample

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def fits(case: Case) -> None:
    positional, rules = cases.build(case, "cpu")
    before = positional[0].clone()
    tokens, logp, kept = sample(*positional, **rules)
    assert tokens.dtype == kept.dtype == torch.int64 and logp.dtype == torch.float32
    for row, (order, x, score, counts) in enumerate(cases.oracle(*positional, rules)):
        count, token = int(kept[row]), int(tokens[row])
        assert count in counts
        stay = order[:count]
        assert token in stay.tolist()
        # two scores that are equal up to float32 may change places
        assert float(score[stay].max() - score[token]) <= 1e-5 * max(1.0, float(score[token].abs()))
        want = float(x[token] - x[stay].logsumexp(0))
        assert float(logp[row]) == pytest.approx(want, abs=4e-6 * max(1.0, float(x[token].abs())))
    again = sample(*positional, **rules)
    assert torch.equal(tokens, again[0]) and torch.equal(logp, again[1]) and torch.equal(kept, again[2])
    assert torch.equal(positional[0].nan_to_num(9.0), before.nan_to_num(9.0))


def test_a_draw_is_the_definitions(mode: str) -> None:
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.differing_executors]
    examples = 100 if mode == "reference" else 40
    settings(max_examples=examples, deadline=None, suppress_health_check=health)(given(cases.STRATEGY)(fits))()


@pytest.mark.parametrize("case", cases.WIDE, ids=lambda case: f"{case.variant}-{case.dtype}")
def test_it_holds_over_many_blocks(mode: str, case: Case) -> None:
    fits(case)


@pytest.mark.interpreted
@pytest.mark.parametrize("rules", cases.RULES)
@pytest.mark.parametrize(("sizes", "room"), [((30, 200), 200), ((8, 1000), 1000), ((6, 300), 3)])
def test_both_implementations_draw_the_same_tokens(
    rules: str, sizes: tuple[int, int], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(sizes=sizes, dtype=torch.float32, variant=rules, magnitude=2.0, seed=3)
    positional, fields = cases.build(case, "cpu")
    want = sample(*positional, **fields)
    monkeypatch.setitem(BACKENDS, "cpu", "triton")
    monkeypatch.setattr("areno_fn.kernels.sample.triton.ROOM", room)
    got = sample(*positional, **fields)
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("rules", cases.RULES)
def test_a_broken_row_does_not_come_out_finite(mode: str, rules: str) -> None:
    (logits, key, ids, positions), fields = cases.build(Case(sizes=(3, 50), dtype=torch.float32, variant=rules), "cpu")
    logits[1, 17] = torch.nan
    tokens, logp, kept = sample(logits, key, ids, positions, **fields)
    assert logp.isnan().tolist() == [False, True, False]
    assert bool(((tokens >= 0) & (tokens < 50)).all())
    assert bool(((kept >= 1) & (kept <= 50)).all())


@pytest.mark.parametrize("size", [1, 2, 256, 257, 600])
@pytest.mark.parametrize("rules", cases.RULES)
def test_a_row_without_a_token_has_no_probability(mode: str, rules: str, size: int) -> None:
    case = Case(sizes=(3, size), dtype=torch.float32, variant=rules)
    (logits, key, ids, positions), fields = cases.build(case, "cpu")
    logits[1] = -torch.inf
    tokens, logp, kept = sample(logits, key, ids, positions, **fields)
    assert (logp == -torch.inf).tolist() == [False, True, False] and int(tokens[1]) == 0
    assert bool(((kept >= 1) & (kept <= size)).all())


def test_what_does_not_fit_is_refused() -> None:
    rules, ids = cases.RULES["plain"], torch.arange(2)
    for logits, names in (
        (torch.ones(2, 0), ids),
        (torch.ones(2), ids),
        (torch.ones(3, 4), ids),
        (torch.ones(2, 4), ids.int()),
    ):
        with pytest.raises(KernelError, match=r"sample: logits must be floating \[B, V\] with V > 0"):
            sample(logits, Key.of(0), names, names, **rules)
