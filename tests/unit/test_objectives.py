"""Losses against hand-worked numbers, and the one reduction that all of them use."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from areno_fn.contracts.actions import Actions, Scores, Sums
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.record import replace
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.objectives.kl import kl
from areno_fn.steps.objectives.sequence import sequence_clipped
from areno_fn.steps.reduce import aggregate, count_of, finish, masked, measure, reduce_sums

F64 = torch.float64
TABLE = 5e-8  # the tabled values were computed in float32, whose rounding near 1 is of this size
NAN, INF = math.nan, math.inf


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def actions(
    logp: torch.Tensor,
    old: Any,
    advantage: Any,
    *,
    weight: Any = None,
    segments: Any = None,
    reference: Any = None,
    rollout: Any = None,
) -> Actions:
    segments = torch.zeros(len(logp), dtype=torch.int64) if segments is None else torch.tensor(segments)
    return Actions(
        logp=logp,
        weight=torch.ones(len(logp), dtype=F64) if weight is None else tensor(*weight),
        segments=segments,
        entropy=torch.zeros(len(logp), dtype=F64),
        old=tensor(*old),
        advantage=tensor(*advantage),
        reference=None if reference is None else tensor(*reference),
        rollout=None if rollout is None else tensor(*rollout),
        documents=int(segments.max()) + 1,
    )


def scores(logp: torch.Tensor, weight: torch.Tensor, segments: torch.Tensor, documents: int) -> Scores:
    return Scores(logp=logp, weight=weight, segments=segments, entropy=torch.zeros_like(logp), documents=documents)


def loss_and_grad(stage: Any, logp: tuple[float, ...], **fields: Any) -> tuple[float, list[float], dict[str, float]]:
    """Loss, its gradient in logp, and the metrics."""
    point = tensor(*logp).requires_grad_()
    sums = stage(actions(point, **fields))
    (gradient,) = torch.autograd.grad(sums.total / sums.weight, point)
    return (
        (sums.total / sums.weight).item(),
        gradient.tolist(),
        {k: float(v.detach()) for k, v in measure(sums).items()},
    )


# ------------------------------------------------------------------------------------------ aggregate


def test_L1_L3_totals_are_divided_once() -> None:
    """Rows [1] and [2, 3, 4] in two micro-batches: 2.5; rank losses [4] and [1, 1, 1]: 1.75."""
    for first, second, right in (((1.0,), (2.0, 3.0, 4.0), 2.5), ((4.0,), (1.0, 1.0, 1.0), 1.75)):
        parts = []
        for row in (first, second):
            zeros = torch.zeros(len(row), dtype=torch.int64)
            parts.append(cross_entropy()(scores(-tensor(*row), torch.ones(len(row)), zeros, 1)))
        assert finish(reduce_sums(parts))["train/loss"] == right


def test_L5_the_denominator_counts_only_what_is_not_masked() -> None:
    values = torch.cat([torch.full((8,), 5.0), torch.full((4,), 3.0)])
    segments = torch.tensor([0] * 8 + [1] * 4)
    weight = torch.tensor([0.0] * 8 + [1.0] * 4)
    assert [x.item() for x in aggregate(values, weight, segments, 2, "token_mean")] == [12.0, 4.0]
    assert [x.item() for x in aggregate(values, weight, segments, 2, "seq_mean_token_mean")] == [3.0, 1.0]
    assert [x.item() for x in aggregate(values, weight, segments, 2, "seq_mean_token_sum")] == [12.0, 1.0]
    assert [x.item() for x in aggregate(values, weight, segments, 2, "constant_length", 2.0)] == [6.0, 1.0]


@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length"])
def test_L5_L7_an_empty_mask_is_exactly_zero(how: str) -> None:
    logp = torch.tensor([NAN, 1.0, -INF], requires_grad=True)
    sums = cross_entropy(how, 2.0)(scores(logp, torch.zeros(3), torch.tensor([0, 0, 1]), 2))
    (gradient,) = torch.autograd.grad(sums.total, logp)
    assert sums.total.item() == 0.0 and sums.weight.item() == 0.0 and gradient.tolist() == [0.0] * 3
    assert set(finish(sums).values()) == {0.0}


@pytest.mark.parametrize(
    ("how", "constant", "right"),
    [
        ("token_mean", None, 4 / 3),
        ("seq_mean_token_sum", None, 2.0),
        ("seq_mean_token_mean", None, 1.5),
        ("constant_length", 2.0, 1.0),
    ],
)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 0, 1]])
def test_L6_aggregations(how: str, constant: float | None, right: float, order: list[int]) -> None:
    values = torch.tensor([1.0, 1.0, 2.0, NAN])[order]
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0])[order]
    segments = torch.tensor([0, 0, 1, 1])[order]
    total, denominator = aggregate(values, weight, segments, 2, how, constant)
    assert (total / denominator).item() == pytest.approx(right, abs=1e-7)


def test_L7_masked_values_never_enter() -> None:
    values = torch.tensor([1.0, NAN], requires_grad=True)
    total, denominator = aggregate(values, torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), 1, "token_mean")
    assert (total / denominator).item() == 1.0
    assert torch.autograd.grad(total, values)[0].tolist() == [1.0, 0.0]
    assert aggregate(values, torch.tensor([True, False]), torch.tensor([0, 0]), 1, "token_mean")[0].item() == 1.0


def test_fractional_weights() -> None:
    values, weight, segments = tensor(1, 2, 3), tensor(0.5, 1.5, 2.0), torch.tensor([0, 0, 1])
    assert [x.item() for x in aggregate(values, weight, segments, 2, "token_mean")] == [9.5, 4.0]
    total, denominator = aggregate(values, weight, segments, 2, "seq_mean_token_mean")
    assert (total / denominator).item() == pytest.approx((3.5 / 2 + 3) / 2, abs=1e-15)


def test_low_precision_is_summed_in_float32() -> None:
    values = torch.full((4096,), 1 / 3, dtype=torch.bfloat16)
    total, _ = aggregate(values, torch.ones(4096), torch.zeros(4096, dtype=torch.int64), 1, "token_mean")
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(4096 * float(torch.tensor(1 / 3, dtype=torch.bfloat16)), rel=1e-6)


def test_an_unknown_aggregation_is_refused_when_the_objective_is_built() -> None:
    for build in (cross_entropy, lambda how: clipped(aggregation=how)):
        with pytest.raises(SpecError, match=r"aggregation 'mean' does not exist; choose one of token_mean, "):
            build("mean")
        with pytest.raises(SpecError, match=r"needs a finite constant > 0"):
            build("constant_length")


def test_a_stat_must_be_a_count_a_mean_or_a_deviation() -> None:
    with pytest.raises(RecordError, match=r"stats\['odd'\] has shape \(4,\)"):
        measure(Sums(total=torch.zeros(()), weight=torch.ones(()), stats={"odd": torch.zeros(4)}, peaks={}))


def test_metrics_of_one_name_are_refused() -> None:
    sums = Sums(total=torch.zeros(()), weight=torch.ones(()), stats={"loss": torch.zeros(2)}, peaks={})
    with pytest.raises(RecordError, match="two metrics are called 'loss'"):
        measure(sums)


def test_parts_must_report_the_same_names() -> None:
    one = Sums(total=torch.zeros(()), weight=torch.ones(()), stats={"a": torch.zeros(2)}, peaks={})
    other = Sums(total=torch.zeros(()), weight=torch.ones(()), stats={}, peaks={})
    with pytest.raises(RecordError, match="'a' is in one part and not in the other"):
        reduce_sums([one, other])


def test_sums_add_and_peaks_are_maxima() -> None:
    def part(number: float) -> Sums:
        one = torch.tensor(number)
        return Sums(total=one, weight=one + 1, stats={"a": torch.stack([one, one])}, peaks={"p": -one})

    whole = reduce_sums(part(n) for n in (1.0, 2.0, 4.0))
    assert (whole.total.item(), whole.weight.item(), whole.peaks["p"].item()) == (7.0, 10.0, -1.0)
    assert whole.stats["a"].tolist() == [7.0, 7.0]


def test_masked_keeps_double_and_widens_the_rest() -> None:
    assert masked(torch.ones(2, dtype=torch.bfloat16), torch.ones(2)).dtype == torch.float32
    assert masked(torch.ones(2, dtype=F64), torch.ones(2)).dtype == F64
    assert count_of(torch.tensor([0.5, 0.0, 2.0])).tolist() == [2.0]


# ------------------------------------------------------------------------------------------ cross entropy


@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0], [1, 2, 3]], [[0, 1], [2, 3]], [[3], [2], [1], [0]]])
def test_sft_one_token_at_1_three_at_3_is_2_5_under_any_split(split: list[list[int]]) -> None:
    logp = tensor(-1, -3, -3, -3)
    parts = [
        cross_entropy()(scores(logp[p], torch.ones(len(p)), torch.zeros(len(p), dtype=torch.int64), 1)) for p in split
    ]
    metrics = finish(reduce_sums(parts))
    assert metrics["train/loss"] == 2.5 and metrics["train/tokens"] == 4.0


def test_sft_reports_the_entropy_of_response_tokens() -> None:
    s = Scores(
        logp=tensor(-1, -2, -3),
        weight=tensor(1, 0, 1),
        segments=torch.zeros(3, dtype=torch.int64),
        entropy=tensor(0.5, NAN, 1.5),
        documents=1,
    )
    assert finish(cross_entropy()(s)) == {"train/loss": 2.0, "train/entropy": 1.0, "train/tokens": 2.0}


# ------------------------------------------------------------------------------------------ clipped surrogate


def test_L17_the_clip_binds_and_its_gradient_is_exactly_zero() -> None:
    loss, gradient, metrics = loss_and_grad(clipped(), (-0.5,), old=(-1.0,), advantage=(1.0,))
    assert loss == pytest.approx(-1.2, abs=1e-15) and gradient == [0.0]
    assert metrics["ratio_mean"] == pytest.approx(1.6487212707, abs=1e-9) == metrics["ratio_max"]
    assert metrics["clip_fraction"] == 1.0 and metrics["clip_fraction_low"] == 0.0
    assert metrics["logp_diff_mean"] == metrics["logp_diff_max"] == 0.5


def test_L17_the_old_log_probability_must_be_data() -> None:
    logp = tensor(-0.5).requires_grad_()
    good = actions(logp, (-1.0,), (1.0,), reference=(-1.0,))
    for name in ("old", "advantage", "reference"):
        bad = replace(good, **{name: logp * 1})
        with pytest.raises(RecordError, match=rf"Actions\.{name} carries a gradient; it is data"):
            clipped()(bad)


@pytest.mark.parametrize(
    ("logp", "advantage", "loss", "slope"),
    [
        (-0.5, -1.0, math.exp(0.5), math.exp(0.5)),  # the clip never helps a bad action: no bound above
        (-1.5, 1.0, -math.exp(-0.5), -math.exp(-0.5)),  # nor a good one that became rarer
        (-1.5, -1.0, 0.8, 0.0),
        (-0.9, 1.0, -math.exp(0.1), -math.exp(0.1)),
    ],
)
def test_the_clip_is_one_sided(logp: float, advantage: float, loss: float, slope: float) -> None:
    found, gradient, metrics = loss_and_grad(clipped(), (logp,), old=(-1.0,), advantage=(advantage,))
    assert found == pytest.approx(loss, abs=1e-14) and gradient == [pytest.approx(slope, abs=1e-14)]
    assert metrics["clip_fraction"] == float(slope == 0.0) == metrics["clip_fraction_low"]


def test_clip_higher_has_two_bounds() -> None:
    loss, gradient, metrics = loss_and_grad(
        clipped(0.2, 0.28), (-0.75, -1.25, -0.7), old=(-1, -1, -1), advantage=(1, -1, 1)
    )
    assert loss == pytest.approx((-1.28 + 0.8 - 1.28) / 3, abs=1e-14) and gradient == [0.0, 0.0, 0.0]
    assert metrics["clip_fraction"] == 1.0 and metrics["clip_fraction_low"] == pytest.approx(1 / 3)
    _, gradient, _ = loss_and_grad(clipped(0.2, 0.28), (-0.76,), old=(-1.0,), advantage=(1.0,))
    assert gradient == [pytest.approx(-math.exp(0.24))]


def test_grpo_packed_three_tokens() -> None:
    loss, gradient, metrics = loss_and_grad(
        clipped(), (-1.0, -2.0, -3.0), old=(-1.0, -2.0, -3.0), advantage=(1, 1, -1), segments=[0, 0, 1]
    )
    assert loss == pytest.approx(-1 / 3, abs=1e-15)
    assert gradient == pytest.approx([-1 / 3, -1 / 3, 1 / 3], abs=1e-15)
    assert metrics["ratio_std"] == 0.0 and metrics["tokens"] == 3.0


def test_L11_ppo_value_with_k3() -> None:
    stage = clipped(kl_coef=0.01, kl_estimator="k3")
    fields = {"old": (-0.3, -0.4), "advantage": (1, -1), "reference": (-0.25, -0.35)}
    loss, gradient, metrics = loss_and_grad(stage, (-0.2, -0.45), **fields)
    assert loss == pytest.approx(-0.07693876, abs=TABLE)
    assert metrics["policy_loss"] == pytest.approx(-0.07697076, abs=TABLE)
    assert metrics["kl"] == pytest.approx(0.00320017, abs=TABLE)
    assert metrics["ratio_mean"] == pytest.approx(1.02820015, abs=TABLE)
    assert gradient == pytest.approx([-0.55234164, 0.47508886], abs=TABLE)
    ratios = [math.exp(0.1), math.exp(-0.05)]
    divergence = (math.exp(-0.05) - 1 + 0.05 + math.exp(0.1) - 1 - 0.1) / 2
    assert loss == pytest.approx((ratios[1] - ratios[0]) / 2 + 0.01 * divergence, abs=1e-15)
    assert metrics["ratio_std"] == pytest.approx((ratios[0] - ratios[1]) / 2, abs=1e-12)
    assert metrics["ratio_max"] == pytest.approx(ratios[0])
    assert metrics["logp_diff_mean"] == pytest.approx(0.075) and metrics["logp_diff_max"] == pytest.approx(0.1)


def test_ppo_packed_value_with_k3() -> None:
    fields = {"old": (-0.2, -0.4), "advantage": (1, -1), "reference": (-0.25, -0.45), "segments": [0, 1]}
    loss, gradient, metrics = loss_and_grad(clipped(kl_coef=0.01), (-0.1, -0.5), **fields)
    assert loss == pytest.approx(-0.10010687, abs=TABLE)
    assert metrics["policy_loss"] == pytest.approx(-0.10016677, abs=TABLE)
    assert metrics["kl"] == pytest.approx(0.00598949, abs=TABLE)
    assert gradient == pytest.approx([-0.551889, 0.45216236], abs=TABLE)


def test_L11_the_kl_term_is_added() -> None:
    """A policy loss of 0 and a KL of 0.1 under coefficient 0.5: the loss is +0.05."""
    stage = clipped(kl_coef=0.5, kl_estimator="k1")
    loss, gradient, metrics = loss_and_grad(stage, (-0.9,), old=(-0.9,), advantage=(0.0,), reference=(-1.0,))
    assert metrics["policy_loss"] == 0.0 and metrics["kl"] == pytest.approx(0.1)
    assert loss == pytest.approx(0.05, abs=1e-15) and gradient == pytest.approx([0.5])


def test_kl_is_reported_but_not_used_without_a_coefficient() -> None:
    loss, gradient, metrics = loss_and_grad(clipped(), (-0.9,), old=(-0.9,), advantage=(0.0,), reference=(-1.0,))
    assert loss == 0.0 and gradient == [0.0] and metrics["kl"] == pytest.approx(math.exp(-0.1) - 1 + 0.1)
    _, _, without = loss_and_grad(clipped(), (-0.9,), old=(-0.9,), advantage=(0.0,))
    assert "kl" not in without


def test_a_kl_coefficient_needs_a_reference() -> None:
    with pytest.raises(RecordError, match=r"kl_coef=0\.1, but the Actions carry no reference"):
        clipped(kl_coef=0.1)(actions(tensor(-1.0), (-1.0,), (1.0,)))


def test_the_kl_term_follows_the_aggregation() -> None:
    fields = {"old": (-1, -1, -1), "advantage": (0, 0, 0), "reference": (-1.5, -1.5, -2), "segments": [0, 0, 1]}
    for how, right in (("token_mean", 2 / 3), ("seq_mean_token_mean", 0.75), ("seq_mean_token_sum", 1.0)):
        loss, _, metrics = loss_and_grad(
            clipped(aggregation=how, kl_coef=1.0, kl_estimator="k1"), (-1, -1, -1), **fields
        )
        assert loss == pytest.approx(right) and metrics["kl"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_L7_nothing_masked_reaches_loss_gradient_or_metrics(how: str, estimator: str) -> None:
    stage = clipped(aggregation=how, constant=4.0, kl_coef=0.1, kl_estimator=estimator)
    clean = {"old": (-1, -1.2), "advantage": (1, -1), "reference": (-1.1, -1), "segments": [0, 1]}
    dirty = {
        name: (*value[:1], junk, value[1])
        for (name, value), junk in zip(clean.items(), (NAN, INF, -INF, 1), strict=True)
    }
    loss, gradient, metrics = loss_and_grad(stage, (-0.9, -1.3), **clean)
    for junk in (NAN, INF, -INF, 1e30):
        loss_2, gradient_2, metrics_2 = loss_and_grad(stage, (-0.9, junk, -1.3), weight=(1, 0, 1), **dirty)
        assert loss_2 == loss and metrics_2 == metrics and gradient_2 == [gradient[0], 0.0, gradient[1]]


def test_bad_bounds_are_refused() -> None:
    for bad in ({"low": 0.0}, {"low": 1.5}, {"high": 0.0}, {"kl_coef": -1.0}):
        with pytest.raises(SpecError, match="clipped needs 0 < low <= 1"):
            clipped(**bad)


def test_gradients_against_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(12, generator=generator, dtype=F64) * 3
    logp = (old + 0.3 * torch.randn(12, generator=generator, dtype=F64)).requires_grad_()
    segments = torch.randint(0, 3, (12,), generator=generator)
    for how in ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length"):
        for estimator in ("k1", "k2", "k3", "abs"):
            stage = clipped(0.2, 0.28, aggregation=how, constant=5.0, kl_coef=0.3, kl_estimator=estimator)

            def loss(point: torch.Tensor, stage: Any = stage) -> torch.Tensor:
                sums = stage(
                    Actions(
                        logp=point,
                        weight=torch.ones(12, dtype=F64),
                        segments=segments,
                        entropy=torch.zeros(12, dtype=F64),
                        old=old,
                        advantage=torch.linspace(-2, 2, 12, dtype=F64),
                        reference=old - 0.1,
                        documents=3,
                    )
                )
                return sums.total / sums.weight

            assert torch.autograd.gradcheck(loss, logp)


# ------------------------------------------------------------------------------------------ KL


def test_L12_kl_values_and_gradients() -> None:
    logp = tensor(-1.0).requires_grad_()
    for name, value, slope in (("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.1065307, 0.3934693), ("abs", 0.5, 1.0)):
        estimate = kl(logp, tensor(-1.5), name)
        assert estimate.item() == pytest.approx(value, abs=5e-8)
        assert torch.autograd.grad(estimate.sum(), logp)[0].item() == pytest.approx(slope, abs=5e-8)


def test_kl_two_tokens() -> None:
    logp, reference = tensor(-0.2, -0.5), tensor(-0.3, -0.4)
    assert kl(logp, reference, "k1").tolist() == pytest.approx([0.1, -0.1])
    assert kl(logp, reference, "k2").tolist() == pytest.approx([0.005, 0.005])
    assert kl(logp, reference, "k3").tolist() == pytest.approx([0.00483739, 0.00517094], abs=TABLE)
    exact = [math.exp(-0.1) - 1 + 0.1, math.exp(0.1) - 1 - 0.1]
    assert kl(logp, reference, "k3").tolist() == pytest.approx(exact, abs=1e-15)


def test_L12_a_clamped_token_has_a_finite_value_and_zero_gradient() -> None:
    logp = tensor(-60.0, -1.0, -21.5).requires_grad_()
    estimate = kl(logp, tensor(-1.0, -60.0, -1.5), "k3")
    assert estimate.tolist() == pytest.approx([math.exp(20) - 21, math.exp(-20) + 19, math.exp(20) - 21])
    gradient = torch.autograd.grad(estimate.sum(), logp)[0].tolist()
    assert gradient[:2] == [0.0, 0.0]
    _, slope, metrics = loss_and_grad(clipped(), (-1.0,), old=(-60.0,), advantage=(-1.0,))
    assert metrics["ratio_max"] == pytest.approx(math.exp(20)) and slope == [0.0]


def test_k3_keeps_its_digits_near_zero_in_float32() -> None:
    estimate = kl(torch.tensor([-1.0]), torch.tensor([-1.0 - 2.0**-10]), "k3")
    exact = math.exp(-(2.0**-10)) - 1 + 2.0**-10
    assert estimate.dtype == torch.float32 and estimate.item() == pytest.approx(exact, rel=2e-4)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(SpecError, match="KL estimator 'k4' does not exist; choose one of k1, k2, k3, abs"):
        clipped(kl_estimator="k4")


# ------------------------------------------------------------------------------------------ GSPO


def test_L14_one_term_a_sequence_whose_ratio_goes_by_the_mean() -> None:
    """Log ratios .2, -.1, .3: s = exp(.4 / 3), whether the sequence is alone or beside a longer one."""
    right = 1.1426308
    wide_open = sequence_clipped(0.9, 9.0)
    loss, gradient, metrics = loss_and_grad(wide_open, (0.2, -0.1, 0.3), old=(0, 0, 0), advantage=(1, 1, 1))
    assert loss == pytest.approx(-right, abs=TABLE)
    assert gradient == pytest.approx([-right / 3] * 3, abs=TABLE)
    assert metrics["ratio_mean"] == pytest.approx(right, abs=TABLE)
    longer = loss_and_grad(
        wide_open,
        (0.2, -0.1, 0.3, *[0.0] * 7),
        old=[0.0] * 10,
        advantage=[1.0] * 3 + [-1.0] * 7,
        segments=[0] * 3 + [1] * 7,
    )
    assert longer[0] == pytest.approx((-right + 1) / 2, abs=TABLE)
    assert longer[1] == pytest.approx([-right / 6] * 3 + [1 / 14] * 7, abs=TABLE)


def test_L15_a_long_sequence_is_not_weighted_down() -> None:
    count = 282
    loss, _, metrics = loss_and_grad(
        sequence_clipped(0.9, 9.0), (-0.01,) * count, old=(0.0,) * count, advantage=(1.0,) * count
    )
    assert -loss == pytest.approx(math.exp(-0.01), abs=1e-12)
    assert metrics["ratio_mean"] == pytest.approx(0.990050, abs=5e-7)  # exp of the sum would be .0596


def test_gspo_packed_of_the_table() -> None:
    loss, gradient, _ = loss_and_grad(
        sequence_clipped(), (-0.5, -0.4, -0.3), old=(-0.5, -0.4, -0.3), advantage=(1, 1, -1), segments=[0, 0, 1]
    )
    assert loss == pytest.approx(0.0, abs=1e-15)
    assert gradient == pytest.approx([-0.25, -0.25, 0.5], abs=1e-12)


@pytest.mark.parametrize(
    ("logp", "advantage", "loss", "slope"),
    [
        (0.1, 1.0, -1.0004, 0.0),
        (0.1, -1.0, math.exp(0.1), math.exp(0.1)),
        (-0.1, -1.0, 0.9997, 0.0),
        (-0.1, 1.0, -math.exp(-0.1), -math.exp(-0.1)),
    ],
)
def test_gspo_clips_whole_sequences(logp: float, advantage: float, loss: float, slope: float) -> None:
    found, gradient, metrics = loss_and_grad(
        sequence_clipped(), (logp + 0.5, logp - 0.5), old=(0, 0), advantage=(advantage, advantage)
    )
    assert found == pytest.approx(loss, abs=1e-12)
    assert gradient == pytest.approx([slope / 2] * 2, abs=1e-12)
    assert metrics["clip_fraction"] == float(slope == 0)
    assert metrics["clip_fraction_low"] == float(slope == 0 and advantage < 0)


def test_gspo_adds_the_mean_kl_of_a_sequence() -> None:
    fields: dict[str, Any] = {"old": (-1, -1, -1), "advantage": (0, 0, 0), "reference": (-1.5, -1.5, -1.5)}
    loss, gradient, metrics = loss_and_grad(
        sequence_clipped(kl_coef=0.5, kl_estimator="k2"), (-1.0, -1.0, -1.0), segments=[0, 0, 1], **fields
    )
    assert loss == pytest.approx(0.5 * 0.125, abs=1e-12) and metrics["policy_loss"] == 0.0
    assert gradient == pytest.approx([0.5 * 0.5 / 4] * 2 + [0.5 * 0.5 / 2], abs=1e-12)
    with pytest.raises(RecordError, match="sequence_clipped has kl_coef=0.5, but the Actions carry no reference"):
        sequence_clipped(kl_coef=0.5)(actions(tensor(-1.0), (-1.0,), (1.0,)))
    with pytest.raises(SpecError, match="sequence_clipped needs 0 < low <= 1"):
        sequence_clipped(low=0.0)


# ------------------------------------------------------------------------------------------ dual clip, importance


def test_the_dual_clip_of_the_table() -> None:
    """Old (-3, -3, -1), logp (-.5, -.5, -1.5), A (-1, 1, 1), c = 3: loss terms 3, -1.2 and -exp(-.5)."""
    loss, gradient, _ = loss_and_grad(clipped(dual=3.0), (-0.5, -0.5, -1.5), old=(-3, -3, -1), advantage=(-1, 1, 1))
    assert loss == pytest.approx(0.3978231, abs=TABLE)
    assert gradient == pytest.approx([0.0, 0.0, -0.2021769], abs=TABLE)
    free, slopes, _ = loss_and_grad(clipped(), (-0.5, -0.5, -1.5), old=(-3, -3, -1), advantage=(-1, 1, 1))
    assert slopes[0] == pytest.approx(math.exp(2.5) / 3) and free > loss
    with pytest.raises(SpecError, match="dual > 1 and importance_cap > 0, or 0 for none, received dual=1.0"):
        clipped(dual=1.0)


def test_the_importance_of_a_token_is_truncated_data() -> None:
    """Weights exp(old - rollout) of e^.1, e^-.2 and, capped, 2."""
    fields: dict[str, Any] = {"old": (-1, -1, -1), "advantage": (1, 1, -1), "rollout": (-1.1, -0.8, -3)}
    loss, gradient, metrics = loss_and_grad(clipped(importance_cap=2.0), (-1.0, -1.0, -1.0), **fields)
    weights = [math.exp(0.1), math.exp(-0.2), 2.0]
    assert loss == pytest.approx((-weights[0] - weights[1] + weights[2]) / 3, abs=1e-12)
    assert gradient == pytest.approx([-weights[0] / 3, -weights[1] / 3, weights[2] / 3], abs=1e-12)
    assert metrics["logp_diff_mean"] == pytest.approx((0.1 + 0.2 + 2.0) / 3, abs=1e-12)
    assert metrics["logp_diff_max"] == pytest.approx(2.0)
    assert metrics["importance_max"] == pytest.approx(math.exp(2))  # before it is truncated
    free = loss_and_grad(clipped(), (-1.0, -1.0, -1.0), **fields)
    assert free[1] == pytest.approx([-1 / 3, -1 / 3, 1 / 3]), "off by default"
    for measured in (metrics, free[2]):
        assert measured["importance_mean"] == pytest.approx((math.exp(0.1) + math.exp(-0.2) + math.exp(2)) / 3)
    for build in (clipped, sequence_clipped):
        with pytest.raises(RecordError, match=r"importance_cap=2\.0, but the Actions carry no rollout"):
            build(importance_cap=2.0)(actions(tensor(-1.0), (-1.0,), (1.0,)))
        with pytest.raises(SpecError, match=r"importance_cap > 0, or 0 for none, received dual=0.0, importance_cap=-1"):
            build(importance_cap=-1)


def test_L15_the_importance_of_a_sequence_is_by_the_mean() -> None:
    """282 tokens that training finds less probable by .01 each: weight exp(-.01) = .990050; of the sum it were .0596."""
    count = 282
    fields: dict[str, Any] = {
        "old": [-1.01] * count + [-1.0, -1.0],
        "rollout": [-1.0] * count + [-2.0, -4.0],
        "advantage": [1.0] * count + [-1.0, -1.0],
        "segments": [0] * count + [1, 1],
    }
    stage = sequence_clipped(importance_cap=2.0)
    loss, gradient, metrics = loss_and_grad(stage, fields["old"], **fields)
    weight = math.exp(-0.01)
    assert weight == pytest.approx(0.990050, abs=5e-7)
    assert loss == pytest.approx((-weight + 2.0) / 2, abs=1e-12)  # the second, e^2, is capped
    assert gradient[:count] == pytest.approx([-weight / 2 / count] * count, rel=1e-9)
    assert gradient[count:] == pytest.approx([0.5, 0.5])
    assert metrics["importance_mean"] == pytest.approx((weight + math.exp(2)) / 2)
    assert metrics["importance_max"] == pytest.approx(math.exp(2))
    assert metrics["ratio_mean"] == 1.0 and metrics["logp_diff_max"] == pytest.approx(3.0)
    assert loss_and_grad(sequence_clipped(), fields["old"], **fields)[0] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("build", [clipped, sequence_clipped])
def test_without_a_second_look_the_importance_is_that_of_the_current_parameters(build: Any) -> None:
    _, _, metrics = loss_and_grad(build(), (-0.9,), old=(-1.0,), advantage=(1.0,))
    assert metrics["importance_mean"] == metrics["importance_max"] == pytest.approx(math.exp(0.1))
    assert metrics["logp_diff_mean"] == pytest.approx(0.1)
