"""Losses of noised samples against formulas written plainly, hand-worked numbers, and their states at the start."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3
from flow_checks import F64, agrees, at, batch_of, rows_named
from flow_models import SHAPE

from areno_fn.contracts.actions import Sums
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.flow import Conditions
from areno_fn.contracts.flow_batch import Noised, Velocities
from areno_fn.contracts.record import replace
from areno_fn.steps.flow.objectives.decoupled import advantage_weighted, centred_reward, diffusion_nft
from areno_fn.steps.flow.objectives.matching import velocity_matching
from areno_fn.steps.flow.objectives.preference import best_and_worst, diffusion_dpo, group_preference
from areno_fn.steps.flow.path import rows_of
from areno_fn.steps.reduce import measure

Stage = Callable[[Velocities], Sums]
ROWS = 6


def one(value: float, **fields: Any) -> tuple[Noised, torch.Tensor]:
    """One row of one element with velocity `value`, target 1, level 1, and everything else at `value`."""

    def latent(x: float) -> torch.Tensor:
        return torch.full((1, 1), x, dtype=F64)

    given = {"target": 1.0, "old": value, "reference": value, "average": value, "sigma": 1.0, "advantage": 0.0} | fields
    batch = Noised(
        state=latent(0.0),
        target=latent(given["target"]),
        sigma=torch.tensor([given["sigma"]], dtype=F64),
        timestep=torch.tensor([1000.0], dtype=F64),
        conditions=Conditions(positive=latent(0.0)),
        weight=torch.ones(1, dtype=F64),
        advantage=torch.tensor([given["advantage"]], dtype=F64),
        groups=torch.zeros(1, dtype=torch.int64),
        old=latent(given["old"]),
        reference=latent(given["reference"]),
        average=latent(given["average"]),
    )
    return batch, latent(value)


def mse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((a - b) ** 2).mean()


# ------------------------------------------------------------------------------------------ flow matching


@pytest.mark.parametrize("weighting", ["velocity", "data", "inverse_square", "cosmap"])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_velocity_matching(weighting: str, cap: float) -> None:
    batch, v = batch_of(ROWS), rows_named("v", ROWS)

    def plain(x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=F64)
        for row in range(ROWS):
            s = batch.sigma[row]
            w = {"velocity": 1.0, "data": s**2, "inverse_square": 1 / s**2}.get(weighting)
            w = 2 / (math.pi * (1 - 2 * s + 2 * s**2)) if w is None else w
            w = w * min(((1 - s) / s) ** 2, cap) if cap else w
            total = total + w * mse(x[row], batch.target[row])
        return total / ROWS

    agrees(*at(velocity_matching(weighting, snr_cap=cap), batch, v)[:2], v, plain)


def test_weightings_are_those_of_diffusers() -> None:
    for weighting, theirs in (("inverse_square", "sigma_sqrt"), ("cosmap", "cosmap")):
        batch, v = batch_of(ROWS), rows_named("v", ROWS)
        weights = compute_loss_weighting_for_sd3(theirs, sigmas=batch.sigma)
        expected = (weights[:, None, None] * (v - batch.target) ** 2).mean().item()
        assert at(velocity_matching(weighting), batch, v)[0] == pytest.approx(expected, rel=1e-7)


def test_the_error_of_data_is_that_of_the_clean_latent() -> None:
    batch, v = batch_of(ROWS), rows_named("v", ROWS)
    share = batch.sigma[:, None, None]
    clean = rows_named("clean", ROWS)
    assert at(velocity_matching("data"), batch, v)[0] == pytest.approx(mse(batch.state - share * v, clean).item())


def test_at_the_target_loss_and_gradient_are_zero() -> None:
    batch = batch_of(ROWS)
    loss, gradient, _ = at(velocity_matching(), batch, batch.target)
    assert loss == 0.0 and not gradient.any()


# ------------------------------------------------------------------------------------------ DiffusionNFT


@pytest.mark.parametrize(("r", "slope"), [(0.0, 1.4), (0.25, 0.7), (0.5, 0.0), (1.0, -1.4)])
def test_L22_nft_keeps_the_reward_in_the_gradient_where_old_is_new(r: float, slope: float) -> None:
    """v = old = .3, target 1, beta 1: the loss is .49 for all r, the gradient 2 beta (2 r - 1)(v - target)."""
    batch, v = one(0.3, advantage=2 * r - 1)
    loss, gradient, _ = at(diffusion_nft(1.0, max_advantage=1.0, adaptive=False), batch, v)
    assert loss == pytest.approx(0.49, rel=1e-12)
    assert gradient.item() == pytest.approx(slope, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("beta", [1.0, 0.1])
@pytest.mark.parametrize("adaptive", [True, False])
def test_nft(beta: float, adaptive: bool) -> None:
    batch, v = batch_of(ROWS), rows_named("v", ROWS)
    clean, kl = rows_named("clean", ROWS), 0.03

    def plain(x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=F64)
        for i in range(ROWS):
            s, old = batch.sigma[i], batch.old[i]
            r = min(max(0.5 + float(batch.advantage[i].clamp(-5, 5)) / 10, 0), 1)
            for share, sign in ((r, 1), (1 - r, -1)):
                mixed, held = (old + sign * beta * (y[i] - old) for y in (x, frozen))
                x0, held = batch.state[i] - s * mixed, batch.state[i] - s * held
                w = max(float((held - clean[i]).abs().mean()), 1e-5) if adaptive else 1.0
                total = total + 5 / beta * share * mse(x0, clean[i]) / w
            total = total + kl * mse(x[i], batch.reference[i])
        return total / ROWS

    agrees(*at(diffusion_nft(beta, adaptive=adaptive, kl_coef=kl), batch, v)[:2], v, plain)


def test_nft_at_the_start_has_a_value_without_and_a_gradient_with_reward_for_every_beta() -> None:
    v = rows_named("old", ROWS)
    found = []
    for beta in (1.0, 0.1, 0.5):
        values, slopes = [], []
        for advantage in (-5.0, 0.0, 2.0):
            batch = batch_of(ROWS, advantage=torch.full((ROWS,), advantage, dtype=F64))
            loss, gradient, _ = at(diffusion_nft(beta), batch, v)
            values.append(loss * beta)
            slopes.append(gradient)
        assert values[0] == pytest.approx(values[1], rel=1e-9) == pytest.approx(values[2], rel=1e-9)
        assert slopes[1].abs().max() < 1e-12 and torch.allclose(slopes[0], -2.5 * slopes[2], atol=1e-12)
        found.append(slopes[0])
    assert torch.allclose(found[0], found[1], atol=1e-10) and torch.allclose(found[0], found[2], atol=1e-10)


# ------------------------------------------------------------------------------------------ AWM


@pytest.mark.parametrize("weighting", ["uniform", "sigma", "square", "huber", "ghuber"])
def test_awm(weighting: str) -> None:
    batch, v = batch_of(ROWS), rows_named("v", ROWS) * 0.1 + rows_named("old", ROWS) * 0.9

    def w(error: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        if weighting == "huber":
            return (torch.sqrt(error + 1e-10) - 1e-5) * s
        if weighting == "ghuber":
            return ((error + 1e-10) ** 0.25 - 1e-10**0.25) * s / 0.25
        return error * {"uniform": 1.0, "sigma": s, "square": s**2}[weighting]

    def plain(x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=F64)
        for i in range(ROWS):
            s, a, target = batch.sigma[i], batch.advantage[i].clamp(-1.5, 1.5), batch.target[i]
            ratio = torch.exp(w(mse(batch.old[i], target), s) - w(mse(x[i], target), s))
            total = total + torch.maximum(-a * ratio, -a * ratio.clamp(0.9, 1.2))
            total = total + 0.1 * mse(x[i], batch.reference[i]) + 0.2 * mse(x[i], batch.average[i])
        return total / ROWS

    stage = advantage_weighted(weighting, 0.1, 0.2, max_advantage=1.5, kl_coef=0.1, average_kl_coef=0.2)
    agrees(*at(stage, batch, v)[:2], v, plain)


def test_awm_by_hand() -> None:
    """v .5, old .3, target 1: l = .25, l_old = .49, ratio e^.24 = 1.2712; with A = 1 and a high clip the loss is -1.2712."""
    batch, v = one(0.5, old=0.3, advantage=1.0)
    assert at(advantage_weighted(low=1.0, high=1.0), batch, v)[0] == pytest.approx(-1.2712491503214047, rel=1e-12)
    assert at(advantage_weighted(), batch, v)[0] == pytest.approx(-1.0001, rel=1e-12)


# ------------------------------------------------------------------------------------------ DGPO, TDM-R1's surrogate


def preference_plain(batch: Noised, beta: float, **options: float) -> Callable[[Any, Any], torch.Tensor]:
    def plain(x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=F64)
        for g in set(batch.groups.tolist()):
            rows = [i for i in range(len(batch.groups)) if batch.groups[i] == g]
            a = {i: batch.advantage[i].clamp(-5, 5) for i in rows}
            d = {i: mse(x[i], batch.target[i]) for i in rows}
            held = {i: mse(frozen[i], batch.target[i]) for i in rows}
            ref = {i: mse(batch.reference[i], batch.target[i]) for i in rows}
            share = torch.sigmoid(sum(a[i] * beta * (held[i] - ref[i]) / len(rows) for i in rows))
            for i in rows:
                stop = False
                if options.get("trust"):
                    ratio = torch.exp(mse(batch.old[i], batch.target[i]) - held[i])
                    stop = bool(ratio > 1 + options["trust"] if a[i] > 0 else ratio < 1 - options["trust"])
                if options.get("runaway"):
                    right_way = held[i] < ref[i] if a[i] > 0 else held[i] > ref[i]
                    stop = stop or bool(right_way and (held[i] - ref[i]) ** 2 > options["runaway"])
                total = total + share * a[i] * (held[i] if stop else d[i])
                total = total + options.get("anchor", 0.0) * (d[i] - ref[i]) ** 2
                total = total + options.get("kl_coef", 0.0) * mse(x[i], batch.reference[i])
        return total / len(batch.groups)

    return plain


@pytest.mark.parametrize(
    ("beta", "options"),
    [
        (100.0, {}),
        (10.0, {"kl_coef": 0.1}),
        (10.0, {"trust": 1e-3}),
        (1.0, {"trust": 1e-3, "runaway": 0.05, "anchor": 0.01}),
    ],
)
def test_group_preference(beta: float, options: dict[str, float]) -> None:
    batch = batch_of(ROWS, groups=torch.tensor([7, 3, 7, 3, 3, 7]))
    v = 0.8 * batch.reference + 0.2 * rows_named("v", ROWS)
    agrees(*at(group_preference(beta, **options), batch, v)[:2], v, preference_plain(batch, beta, **options))


def test_group_preference_by_hand() -> None:
    """d .25, d_ref .49, A 2, beta 10, alone in its group: S = -4.8, sigma(S) = .0081626, loss .0040813."""
    batch, v = one(0.5, reference=0.3, advantage=2.0)
    loss, gradient, sums = at(group_preference(10.0), batch, v)
    share = 1 / (1 + math.exp(4.8))
    assert loss == pytest.approx(share * 0.5, rel=1e-12)
    assert gradient.item() == pytest.approx(share * 2 * 2 * (0.5 - 1), rel=1e-12)
    assert measure(sums)["flow/group_weight"].item() == pytest.approx(share, rel=1e-12)


def test_the_strict_preference_has_another_value_and_the_same_gradient() -> None:
    batch = batch_of(ROWS, advantage=torch.tensor([1.0, -2.0, 0.5, -0.1, 3.0, -1.0], dtype=F64))
    v = 0.9 * batch.reference + 0.1 * rows_named("v", ROWS)
    loss, gradient, _ = at(group_preference(10.0), batch, v)
    value, slope, _ = at(group_preference(10.0, strict=True), batch, v)
    assert torch.allclose(gradient, slope, atol=1e-12) and abs(loss - value) > 1e-3
    expected = 0.0
    for g in range(3):
        d = [mse(v[i], batch.target[i]) - mse(batch.reference[i], batch.target[i]) for i in (2 * g, 2 * g + 1)]
        s = sum(batch.advantage[2 * g + k] * 10 * d[k] / 2 for k in range(2))
        expected += math.log1p(math.exp(float(s))) * 2 / 10
    assert value == pytest.approx(expected / ROWS, rel=1e-10)
    with pytest.raises(RecordError, match="group 0 has advantages of one sign only"):
        at(group_preference(strict=True), replace(batch, advantage=batch.advantage.abs()), v)


def test_the_factor_multiplies_a_row() -> None:
    batch, v = batch_of(ROWS), rows_named("v", ROWS)
    factor = torch.linspace(0.5, 2.0, ROWS, dtype=F64)
    for stage in (velocity_matching(), advantage_weighted(low=0.5, high=0.5), group_preference(1.0), diffusion_nft()):
        whole = at(stage, replace(batch, factor=factor), v)[2].total
        plain = at(stage, batch, v)[1]
        scaled = at(stage, replace(batch, factor=factor), v)[1]
        assert torch.allclose(scaled, plain * factor[:, None, None], atol=1e-12)
        assert whole.isfinite()


# ------------------------------------------------------------------------------------------ CRD


@pytest.mark.parametrize("loss", ["mse", "bce"])
@pytest.mark.parametrize("temperature", [-1.0, 0.0, 0.3])
@pytest.mark.parametrize("adaptive", [True, False])
def test_crd(loss: str, temperature: float, adaptive: bool) -> None:
    batch = batch_of(ROWS, groups=torch.tensor([1, 0, 1, 0, 0, 1]))
    v, beta = rows_named("v", ROWS), 0.7

    def reward(x: torch.Tensor, frozen: torch.Tensor, i: int) -> torch.Tensor:
        def error(y: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
            w = max(float((held - batch.target[i]).abs().mean()), 1e-5) if adaptive else 1.0
            return mse(y, batch.target[i]) / w

        return -(error(x[i], frozen[i]) - error(batch.old[i], batch.old[i]))

    def pools(rows: list[int], a: dict[int, float]) -> list[dict[int, float]]:
        if temperature < 0:
            return [dict.fromkeys(rows, 1.0)]
        if temperature > 0:
            return [{i: math.exp(sign * a[i] / temperature) for i in rows} for sign in (1, -1)]
        found = []
        for sign in (1, -1):
            pool = {i: math.exp(a[i]) * float(sign * batch.advantage[i] > 0) for i in rows}
            found.append(pool if any(pool.values()) else dict.fromkeys(rows, 1.0))
        return found

    def plain(x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=F64)
        for g in (0, 1):
            rows = [i for i in range(ROWS) if batch.groups[i] == g]
            a = {i: min(max(0.5 + float(batch.advantage[i].clamp(-5, 5)) / 10, 0), 1) for i in rows}
            for pool in (found := pools(rows, a)):
                norm = sum(pool.values())
                mean_a = sum(pool[i] * a[i] for i in rows) / norm
                mean_r = sum(pool[i] * reward(frozen, frozen, i) for i in rows) / norm
                for i in rows:
                    r = beta * (reward(x, frozen, i) - mean_r)
                    if loss == "mse":
                        term = (r - (a[i] - mean_a)) ** 2
                    else:
                        p = 1 / (1 + math.exp(-(a[i] - mean_a)))
                        q = torch.sigmoid(r)
                        term = -p * torch.log(q) - (1 - p) * torch.log(1 - q)
                    total = total + 5 / beta * term / len(found)
            for i in rows:
                coefficient = 1e-3 + a[i] * (0.1 - 1e-3)
                total = total + coefficient * mse(x[i], batch.reference[i])
        return total / ROWS

    options = {"loss": loss, "temperature": temperature, "adaptive": adaptive, "kl_coef": 0.1, "kl_floor": 1e-3}
    agrees(*at(centred_reward(beta, **options), batch, v)[:2], v, plain)  # type: ignore[arg-type]


def test_crd_at_the_start_is_the_spread_of_the_rewards() -> None:
    """r = 0: the loss is 5 mean (a - a')^2, and the gradient -2 (a - a') dr 5."""
    batch = batch_of(ROWS, advantage=torch.tensor([1.0, -1.0, 2.0, 0.0, 3.0, 3.0], dtype=F64))
    loss, gradient, _ = at(centred_reward(adaptive=False), batch, batch.old)
    a = 0.5 + batch.advantage / 10
    centred = a - a.reshape(3, 2).mean(1).repeat_interleave(2)
    assert loss == pytest.approx(5 * (centred**2).mean().item(), rel=1e-12)
    slope = -2 * centred[:, None, None] * (-2 * (batch.old - batch.target) / 6) * 5 / ROWS
    assert torch.allclose(gradient, slope, atol=1e-12)


# ------------------------------------------------------------------------------------------ Diffusion-DPO


def pairs_of(rows: int) -> Noised:
    batch = batch_of(rows)
    return replace(batch, sigma=batch.sigma[0::2].repeat_interleave(2))


def test_diffusion_dpo() -> None:
    batch = pairs_of(ROWS)
    v = batch.reference + 0.05 * rows_named("v", ROWS)

    def plain(x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=F64)
        for w in range(0, ROWS, 2):
            change = [mse(x[i], batch.target[i]) - mse(batch.reference[i], batch.target[i]) for i in (w, w + 1)]
            total = total - torch.log(torch.sigmoid(-(20.0 / 2) * (change[0] - change[1])))
        return total / (ROWS // 2)

    agrees(*at(diffusion_dpo(20.0), batch, v)[:2], v, plain)


def test_diffusion_dpo_by_hand() -> None:
    """Errors .25 and .36 against .49 and .49 of the reference, beta 100: x = 50 (.24 - .13) = 5.5, loss log(1 + e^-5.5)."""
    first, v = one(0.5, reference=0.3)
    second, other = one(0.4, reference=0.3)
    stacked = {n: torch.cat([getattr(first, n), getattr(second, n)]) for n in ("state", "target", "sigma", "timestep")}
    batch = Noised(
        **stacked,
        weight=torch.ones(2, dtype=F64),
        conditions=Conditions(positive=torch.zeros(2, 1)),
        reference=torch.cat([first.reference, second.reference]),
    )
    loss, _, sums = at(diffusion_dpo(100.0), batch, torch.cat([v, other]))
    assert loss == pytest.approx(math.log1p(math.exp(-5.5)), rel=1e-10)
    assert measure(sums)["dpo/margin"].item() == pytest.approx(5.5) and measure(sums)["dpo/accuracy"].item() == 1.0


def test_diffusion_dpo_at_the_reference_is_log_2() -> None:
    """The gradient is beta / 4 (de_w - de_l), and the accuracy 0, because nothing is preferred yet."""
    batch = pairs_of(ROWS)
    loss, gradient, sums = at(diffusion_dpo(), batch, batch.reference)
    assert loss == math.log(2) and measure(sums)["dpo/accuracy"].item() == 0.0
    sign = torch.tensor([1.0, -1.0] * 3, dtype=F64)[:, None, None]
    slope = 2000 / 4 * sign * 2 * (batch.reference - batch.target) / 6 / 3
    assert torch.allclose(gradient, slope, atol=1e-12)


def test_a_pair_counts_when_both_of_it_do() -> None:
    batch, v = pairs_of(ROWS), rows_named("v", ROWS)
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0], dtype=F64)
    part = replace(pairs_of(ROWS), weight=weight)
    loss, gradient, sums = at(diffusion_dpo(5.0), part, v)
    first = torch.zeros(ROWS, dtype=F64)
    first[:2] = 1.0
    assert loss == at(diffusion_dpo(5.0), replace(batch, weight=first), v)[0] and sums.weight.item() == 1.0
    assert not gradient[2:].any()
    with pytest.raises(RecordError, match="rows in pairs, preferred first, that share their level"):
        at(diffusion_dpo(), batch_of(ROWS), v)


def test_pairs_of_the_best_and_the_worst() -> None:
    advantages = torch.tensor([0.1, 2.0, 1.0, 1.0, -3.0, 5.0, 5.0])
    groups = torch.tensor([9, 9, 4, 4, 9, 2, 2])
    assert best_and_worst(advantages, groups).tolist() == [1, 4]
    assert best_and_worst(torch.tensor([1.0, 3.0, 2.0, 0.0]), torch.tensor([0, 1, 0, 1])).tolist() == [2, 0, 1, 3]
    assert best_and_worst(torch.ones(3), torch.zeros(3, dtype=torch.int64)).shape == (0,)


# ------------------------------------------------------------------------------------------ of all

REWARDED: dict[str, tuple[Stage, str]] = {
    "nft": (diffusion_nft(), "old"),
    "awm": (advantage_weighted(), "old"),
    "dgpo": (group_preference(10.0), "reference"),
    "crd": (centred_reward(), "old"),
}


@pytest.mark.parametrize("name", REWARDED)
def test_a_higher_advantage_makes_a_sample_likelier(name: str) -> None:
    """After one step, the larger a row's advantage the more its error has fallen, from the state at the start."""
    stage, start = REWARDED[name]
    batch = batch_of(ROWS)
    v = getattr(batch, start)
    changes = []
    for advantage in (-2.0, -0.5, 0.5, 2.0):
        given = batch.advantage.clone()
        given[2] = advantage
        _, gradient, _ = at(stage, replace(batch, advantage=given), v)
        moved = v - 1e-3 * gradient
        changes.append(float(mse(moved[2], batch.target[2]) - mse(v[2], batch.target[2])))
    assert changes[0] > changes[1] > changes[2] > changes[3]


@pytest.mark.parametrize("name", REWARDED)
def test_without_advantage_there_is_no_gradient_at_the_start(name: str) -> None:
    stage, start = REWARDED[name]
    batch = batch_of(ROWS, advantage=torch.zeros(ROWS, dtype=F64))
    assert at(stage, batch, getattr(batch, start))[1].abs().max() < 1e-12


def test_at_the_start_ratios_are_1_and_preferences_one_half() -> None:
    batch = batch_of(ROWS)
    awm = measure(at(advantage_weighted(), batch, batch.old)[2])
    assert awm["ratio_mean"].item() == 1.0 and awm["ratio_max"].item() == 1.0
    assert awm["policy_loss"].item() == pytest.approx(-batch.advantage.mean().item(), rel=1e-12)
    _, gradient, sums = at(group_preference(50.0), batch, batch.reference)
    assert measure(sums)["flow/group_weight"].item() == 0.5
    slope = 0.5 * batch.advantage[:, None, None] * 2 * (batch.reference - batch.target) / 6 / ROWS
    assert torch.allclose(gradient, slope, atol=1e-12)


@pytest.mark.parametrize(
    "stage", [diffusion_nft(kl_coef=1.0), advantage_weighted(kl_coef=1.0), group_preference(kl_coef=1.0)]
)
def test_L22_the_distance_from_the_reference_has_a_gradient(stage: Stage) -> None:
    """At the reference it is exactly 0, afterwards it has the gradient 2 (v - v_ref) / n."""
    batch = batch_of(ROWS, advantage=torch.zeros(ROWS, dtype=F64))
    batch = replace(batch, old=batch.reference)
    start = at(stage, batch, batch.reference)
    assert measure(start[2])["flow/kl"].item() == 0.0 and start[1].abs().max() < 1e-12
    away = batch.reference + 0.1
    moved = at(stage, replace(batch, old=away), away)
    assert measure(moved[2])["flow/kl"].item() == pytest.approx(0.01)
    assert torch.allclose(moved[1], torch.full_like(away, 2 * 0.1 / 6 / ROWS), atol=1e-10)


ALL: dict[str, Stage] = {name: stage for name, (stage, _) in REWARDED.items()} | {
    "sft": velocity_matching(),
    "crd_soft": centred_reward(temperature=0.3),
    "crd_hard": centred_reward(temperature=0.0, loss="bce"),
    "dpo": diffusion_dpo(5.0),
    "surrogate": group_preference(1.0, trust=1e-3, runaway=0.05, anchor=0.01),
}


@pytest.mark.parametrize("name", ALL)
def test_what_does_not_count_changes_nothing(name: str) -> None:
    """Masked elements and rows of weight 0 may hold anything, and have no gradient."""
    batch, v = pairs_of(ROWS), rows_named("v", ROWS)
    mask = torch.ones(ROWS, *SHAPE, dtype=torch.bool)
    mask[:, 1, 1] = False
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0], dtype=F64)
    batch = replace(batch, mask=mask, weight=weight)
    loss, gradient, sums = at(ALL[name], batch, v)

    def spoiled(x: torch.Tensor) -> torch.Tensor:
        return torch.where(mask & (weight != 0)[:, None, None], x, math.nan)

    names = ("target", "old", "reference", "average")
    other = replace(
        batch,
        advantage=torch.where(weight != 0, batch.advantage, math.nan),
        **{n: spoiled(getattr(batch, n)) for n in names},
    )
    again, slope, _ = at(ALL[name], other, spoiled(v))
    assert again == loss and torch.equal(slope, gradient)
    assert sums.weight.item() == (2.0 if name == "dpo" else 4.0)
    assert not gradient[4:].any() and not gradient[:, 1, 1].any() and gradient[:4].abs().max() > 0


@pytest.mark.parametrize("name", ALL)
def test_rows_in_another_order_and_split_by_groups_give_the_same(name: str) -> None:
    batch, v = pairs_of(ROWS), rows_named("v", ROWS)
    _, gradient, sums = at(ALL[name], batch, v)
    order = torch.tensor([4, 5, 0, 1, 2, 3])
    moved = at(ALL[name], rows_of(batch, order), v[order])
    assert torch.allclose(moved[1], gradient[order], atol=1e-12)
    parts = [at(ALL[name], rows_of(batch, rows), v[rows])[2] for rows in (torch.arange(4), torch.arange(4, 6))]
    assert (parts[0].total + parts[1].total).item() == pytest.approx(sums.total.item(), rel=1e-12)
    assert (parts[0].weight + parts[1].weight).item() == sums.weight.item()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: velocity_matching("snr"), "velocity_matching takes a weighting among"),
        (lambda: velocity_matching(snr_cap=-1.0), "snr_cap >= 0"),
        (lambda: diffusion_nft(0.0), "diffusion_nft needs a finite beta > 0, received 0.0"),
        (lambda: diffusion_nft(math.inf), "diffusion_nft needs a finite beta > 0, received inf"),
        (lambda: diffusion_dpo(math.inf), "diffusion_dpo needs a finite beta > 0"),
        (lambda: group_preference(math.inf), "group_preference needs a finite beta > 0"),
        (lambda: group_preference(kl_coef=math.nan), "group_preference needs a finite beta > 0"),
        (lambda: advantage_weighted("l2"), "weighting 'l2' does not exist"),
        (lambda: centred_reward(loss="l1"), "loss 'l1' does not exist"),
        (lambda: centred_reward(max_advantage=0.0), "centred_reward needs a finite max_advantage > 0"),
        (lambda: diffusion_dpo(-1.0), "diffusion_dpo needs a finite beta > 0"),
        (lambda: group_preference(anchor=-1.0), "group_preference needs a finite beta > 0"),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], Stage], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        make()


@pytest.mark.parametrize(
    ("stage", "field"),
    [
        (diffusion_nft(), "old"),
        (advantage_weighted(), "advantage"),
        (advantage_weighted(average_kl_coef=1.0), "average"),
        (diffusion_nft(kl_coef=1.0), "reference"),
        (centred_reward(), "groups"),
        (diffusion_dpo(), "reference"),
        (group_preference(trust=0.1), "old"),
    ],
)
def test_what_a_loss_needs_must_be_there_and_be_data(stage: Stage, field: str) -> None:
    batch = pairs_of(ROWS)
    with pytest.raises(RecordError, match=f"needs Noised.{field}, which is None"):
        at(stage, replace(batch, **{field: None}), batch.target)
    if field != "groups":
        live = getattr(batch, field).clone().requires_grad_()
        with pytest.raises(RecordError, match=f"Noised.{field} carries a gradient"):
            at(stage, replace(batch, **{field: live}), batch.target)
