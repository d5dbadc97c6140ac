"""Generators of few steps and on-policy distillation, as a specification composes them, against the updates written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flow_recipe_toys import KEY, POLICY, STILL, drawn, prompts, taught, worth

import areno_fn as af
from areno_fn import tree
from areno_fn.contracts.actions import Sums
from areno_fn.contracts.flow_batch import Velocities
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import (
    AdamWSpec,
    FewSteps,
    FlowDistill,
    FlowDMD2,
    FlowTaught,
    FlowTDM,
    FlowTDMR1,
    Forgetting,
    SGDSpec,
    StudentDenoising,
    Teacher,
)
from areno_fn.models.digits_dit import DiTConfig
from areno_fn.models.digits_dit.model import DiTPolicy, init
from areno_fn.steps.flow.noise import latent_noise
from areno_fn.steps.flow.times import Times, times_between
from areno_fn.steps.recipes import Teaching

ROLES = ("actor", "fake", "surrogate")


def by_autograd(params: Any, loss: Callable[[Any], torch.Tensor], rate: float = 0.1) -> Any:
    """The parameters after a plain step down a loss."""
    own = tree.map(lambda x: x.clone().requires_grad_(), params)
    loss(own).backward()
    return tree.map(lambda x: x.detach() - rate * (0 if x.grad is None else x.grad), own)


def close(found: Any, expected: Any) -> None:
    for (path, one), other in zip(tree.leaves_with_path(found), tree.leaves(expected), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-3, msg=path)


def column(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, 1, 1, 1)


# ------------------------------------------------------------------------------------------ how phases begin


@pytest.mark.parametrize("spec", [FlowDMD2(), FlowTDM(), FlowTDMR1(samples=2)])
def test_every_role_begins_as_the_actor_in_memory_of_its_own(spec: FlowTaught) -> None:
    _, state = taught(spec)
    assert set(state.params) == set(state.optim) == set(spec.roles)
    for role in spec.roles:
        assert tree.equal(state.params[role], state.params["actor"])
    copies = [*(state.params[role] for role in spec.roles), *state.snapshots.values()]
    assert "reference" in state.snapshots
    assert len({leaf.data_ptr() for copy in copies for leaf in tree.leaves(copy)}) == len(copies) * len(
        tree.leaves(state.params["actor"])
    )


def test_a_phase_begins_with_another_copy_and_fresh_moments() -> None:
    adam = {role: af.adamw(AdamWSpec(lr=1e-2), 10) for role in ROLES}
    algorithm, state = taught(FlowDMD2(fake_updates=1), adam)
    after, _ = algorithm.step(state, drawn(algorithm, state))
    assert not tree.equal(after.params["fake"], after.params["actor"])
    again = algorithm.begin(after)
    assert tree.equal(again.params["fake"], after.params["actor"])
    assert tree.equal(again.optim["fake"], adam["fake"].init(after.params["actor"]))
    assert tree.equal(again.snapshots["reference"], after.params["actor"])


@pytest.mark.parametrize(
    "spec",
    [
        FlowDMD2(samples=2, fake_updates=1),
        FlowTDM(samples=2, fake_updates=1),
        FlowTDMR1(samples=2, fake_updates=1, teacher_guidance=2.0),
        FlowDistill(samples=2, teacher_guidance=2.0, denoising=StudentDenoising(steps=2)),
    ],
)
def test_micro_batches_change_no_update(spec: FlowTaught) -> None:
    """Of 2 latents, of which 4 are drawn more: groups of 2 stay whole."""
    found = []
    for most in (0, 2):
        algorithm, state = taught(spec, micro_rows=most)
        batch = drawn(algorithm, state)
        after, metrics = algorithm.step(state, worth(batch) if isinstance(spec, FlowTDMR1) else batch)
        found.append((after.params, metrics))
    for role in spec.roles:
        close(found[1][0][role], found[0][0][role])
    for name, value in found[0][1].items():
        assert found[1][1][name] == pytest.approx(value, rel=1e-3, abs=1e-6), name


# ------------------------------------------------------------------------------------------ DMD2 and TDM


def test_an_iteration_of_dmd2_by_autograd() -> None:
    """An update of the fake on what the generator sees, noised, and one of the generator by the difference of the judges."""
    algorithm, state = taught(FlowDMD2(samples=2, fake_updates=1, denoising=FewSteps(steps=3, shift=2.0)))
    # judges that differ, so that there is something to learn
    state = replace(state, params={**state.params, "fake": tree.map(lambda x: 0.9 * x, state.params["fake"])})
    batch = drawn(algorithm, state)
    assert batch.ids.tolist() == [20, 21, 22, 23, 24, 25] and batch.groups.tolist() == [10, 10, 11, 11, 12, 12]
    labels = batch.conditions.positive

    def asked(role: str, count: int) -> tuple[torch.Tensor, ...]:
        key = KEY.fold(role).fold(count)
        seen = torch.tensor([int(3 * u) for u in af.random.uniform(key.fold("step"), batch.ids, dtype=torch.float64)])
        sigma = batch.schedule.sigmas[seen]
        low, high = torch.full((6,), 0.02), torch.full((6,), 0.98)
        level = times_between(Times(low=0.02, high=0.98), key.fold("level"), batch.ids, low, high)
        noise = latent_noise(key.fold("noise"), batch.ids, (1, 4, 4))
        return batch.states[torch.arange(6), seen], sigma, level, noise

    def sees(params: Any, state: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return state - column(sigma) * POLICY.velocity(params, state, 1000 * sigma, labels)

    x, sigma, level, noise = asked("fake", 0)
    clean = sees(state.params["actor"], x, sigma).detach()
    shown = (1 - column(level)) * clean + column(level) * noise
    fake = by_autograd(
        state.params["fake"],
        lambda p: (POLICY.velocity(p, shown, 1000 * level, labels) - (noise - clean)).square().mean(),
    )

    x, sigma, level, noise = asked("generator", 1)
    clean = sees(state.params["actor"], x, sigma).detach()
    shown = (1 - column(level)) * clean + column(level) * noise
    judged = {name: sees(p, shown, level).detach() for name, p in (("real", state.params["actor"]), ("fake", fake))}
    scale = (clean - judged["real"]).abs().mean((1, 2, 3))
    direction = (judged["fake"] - judged["real"]) / column(scale)

    def loss(params: Any) -> torch.Tensor:
        return 0.5 * (sees(params, x, sigma) - (clean - direction)).square().mean()

    generator = by_autograd(state.params["actor"], loss)
    after, metrics = algorithm.step(state, batch)
    close(after.params["fake"], fake)
    close(after.params["actor"], generator)
    assert metrics["train/loss"] == pytest.approx(float(loss(state.params["actor"]).detach()), rel=1e-3)
    assert metrics["flow/gap"] == pytest.approx(float((judged["real"] - judged["fake"]).square().mean()), rel=1e-3)
    assert tree.equal(after.counters, af.Counters(optimizer_step=2, rollout_iteration=1))


@pytest.mark.parametrize("query", ["above", "interval"])
def test_an_iteration_of_tdm_by_autograd(query: Any) -> None:
    """All steps at once: the end of a step is carried on to the level of the judges, and the loss is a Huber loss."""
    spec = FlowTDM(fake_updates=1, denoising=FewSteps(steps=2), query=query, huber=0.05)
    algorithm, state = taught(spec, {"fake": af.sgd(SGDSpec(lr=1e-12, max_grad_norm=0.0), 10)})
    state = replace(state, params={**state.params, "fake": tree.map(lambda x: 0.9 * x, state.params["fake"])})
    batch = drawn(algorithm, state)
    labels, sigmas = batch.conditions.positive, batch.schedule.sigmas.tolist()

    def loss(params: Any) -> torch.Tensor:
        total = torch.zeros(())
        for step in (0, 1):
            key = KEY.fold("generator").fold(1).fold(step)
            s, m = torch.full((3,), sigmas[step]), torch.full((3,), sigmas[step + 1])
            high = s if query == "interval" else torch.full((3,), 0.98)
            level = times_between(Times(low=0.02, high=0.98), key.fold("level"), batch.ids, m, high)
            fresh = latent_noise(key.fold("noise"), batch.ids, (1, 4, 4))
            v = POLICY.velocity(params, batch.states[:, step], 1000 * s, labels)
            clean = batch.states[:, step] - column(s) * v
            end = (clean + column(m) * v).detach()
            a = (1 - level) / (1 - m)
            shown = column(a) * end + column((level**2 - (a * m) ** 2).sqrt()) * fresh
            real, fake = (
                (shown - column(level) * POLICY.velocity(state.params[role], shown, 1000 * level, labels)).detach()
                for role in ("actor", "fake")
            )
            delta = clean - (clean.detach() + real - fake)
            bent = (delta**2 + 0.05**2).sqrt() - 0.05
            total = total + (bent.mean((1, 2, 3)) / (clean.detach() - real).abs().mean((1, 2, 3))).mean() / 2
        return total

    generator = by_autograd(state.params["actor"], loss)
    after, metrics = algorithm.step(state, batch)
    close(after.params["actor"], generator)
    assert metrics["train/loss"] == pytest.approx(float(loss(state.params["actor"]).detach()), rel=1e-3)


@pytest.mark.parametrize("spec", [FlowDMD2(fake_updates=3), FlowTDM(fake_updates=3), FlowTDMR1(samples=2)])
def test_while_the_judges_agree_the_generator_stands_still(spec: FlowTaught) -> None:
    """A fake that does not move is the teacher, from whom it began as; so is a surrogate. The gradient is exactly 0."""
    algorithm, state = taught(spec, {"fake": STILL, "surrogate": STILL})
    batch = drawn(algorithm, state)
    after, metrics = algorithm.step(state, worth(batch) if isinstance(spec, FlowTDMR1) else batch)
    assert metrics["train/grad_norm"] == metrics["flow/gap"] == 0
    assert tree.equal(after.params["actor"], state.params["actor"])
    assert metrics["fake/grad_norm"] > 0


def test_every_update_of_the_fake_has_levels_of_its_own() -> None:
    seen: list[torch.Tensor] = []

    def loss(found: Velocities) -> Sums:
        seen.append(found.batch.sigma)
        total = found.velocity.square().mean()
        return Sums(total=total, weight=total.new_tensor(1.0), stats={}, peaks={})

    algorithm, state = taught(FlowDMD2(fake_updates=3), losses={"fake": loss})
    algorithm.step(state, drawn(algorithm, state))
    assert len(seen) == 3 and not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_a_teacher_of_a_folder_is_another_model_and_is_asked_with_its_own_guidance() -> None:
    """The generator meets the teacher's data, by its parameters: its loss is 0 where the fake says what the teacher says."""
    policy = DiTPolicy(DiTConfig(num_classes=3, sample_size=4, num_layers=2, num_heads=2, head_dim=4))
    params = init(policy.config, KEY.fold("teacher"))
    params = tree.map_with_path(
        lambda path, x: x + 0.2 * af.random.normal(KEY.fold(path), torch.arange(x.numel())).reshape(x.shape), params
    )
    gaps = []
    for guidance in (1.0, 3.0):
        spec = FlowDMD2(fake_updates=1, teacher="folder", teacher_guidance=guidance)
        algorithm, state = taught(spec, {"fake": STILL}, (policy, params))
        assert state.snapshots == {}, "a teacher that is a role needs no snapshot"
        batch = drawn(algorithm, state)
        after, metrics = algorithm.step(state, batch)
        assert tree.equal(after.params["teacher"], params) and metrics["train/grad_norm"] > 0
        gaps.append(metrics["flow/gap"])
    assert gaps[0] > 0 and gaps[1] != gaps[0]


# ------------------------------------------------------------------------------------------ TDM-R1


def test_equal_rewards_teach_a_surrogate_nothing() -> None:
    algorithm, state = taught(FlowTDMR1(samples=2, fake_updates=1))
    batch = drawn(algorithm, state)
    after, metrics = algorithm.step(state, worth(batch, torch.ones(6)))
    assert metrics["surrogate/grad_norm"] == metrics["rollout/advantage_std"] == 0
    assert metrics["rollout/zero_std_groups"] == 1
    assert tree.equal(after.params["surrogate"], state.params["surrogate"])


def test_the_first_update_of_a_surrogate_by_autograd() -> None:
    """At the teacher every group has the weight 1/2: the gradient is that of mean A d / 2, each step by k / T and its noise."""
    spec = FlowTDMR1(samples=4, fake_updates=1, denoising=FewSteps(steps=2), scale="none", trust=0.0, runaway=0.0)
    algorithm, state = taught(spec)
    batch = drawn(algorithm, state)
    rewards = torch.linspace(-1, 1, 12) ** 3
    advantage = rewards - rewards.reshape(3, 4).mean(1, keepdim=True).expand(3, 4).reshape(-1)
    labels, sigmas, groups = batch.conditions.positive, batch.schedule.sigmas.tolist(), batch.groups

    def loss(params: Any) -> torch.Tensor:
        total = torch.zeros(())
        for step in (0, 1):
            key = KEY.fold("surrogate").fold(1).fold(step)
            m = torch.full((12,), sigmas[step + 1])
            low, high = m + (1 - m) * 0.02, torch.full((12,), 0.98)
            level = times_between(Times(low=0.02, high=0.98), key.fold("level"), groups, low, high)
            fresh = latent_noise(key.fold("noise"), groups, (1, 4, 4))
            a = (1 - level) / (1 - m)
            b = (level**2 - (a * m) ** 2).sqrt()
            x = column(a) * batch.states[:, step + 1] + column(b) * fresh
            target = (column(level / b) * fresh - x) / column(1 - level)
            d = (POLICY.velocity(params, x, 1000 * level, labels) - target).square().mean((1, 2, 3))
            noisy = (level / b - b) / (1 - level)
            total = total + (0.5 * advantage * d * (step + 1) / 2 / noisy**2).mean() / 2
        return total

    surrogate = by_autograd(state.params["surrogate"], loss)
    after, metrics = algorithm.step(state, worth(batch, rewards))
    close(after.params["surrogate"], surrogate)
    assert metrics["surrogate/group_weight"] == pytest.approx(0.5, abs=1e-6)
    assert metrics["surrogate/kl"] == 0 and metrics["surrogate/kept_fraction"] == 1


def test_the_surrogate_is_followed_by_an_average_whose_decay_rises() -> None:
    """Decays .2 and .3, the cap: s1 = .2 p0 + .8 p1, s2 = .3 s1 + .7 p2."""
    algorithm, state = taught(FlowTDMR1(samples=2, fake_updates=1, slow=Forgetting(start=0.2, rate=0.2, cap=0.3)))
    passed = [state]
    for _ in range(2):
        state, _ = algorithm.step(passed[-1], worth(drawn(algorithm, passed[-1])))
        passed.append(state)
    p0, p1, p2 = (one.params["surrogate"] for one in passed)
    first = tree.map(lambda a, b: 0.2 * a + 0.8 * b, p0, p1)
    close(passed[1].snapshots["slow"], first)
    close(passed[2].snapshots["slow"], tree.map(lambda a, b: 0.3 * a + 0.7 * b, first, p2))
    assert passed[2].controls["slow_updates"] == 2


def test_a_better_sample_becomes_likelier_for_the_surrogate() -> None:
    """After a step down its gradient the velocity error of what has a positive advantage has fallen against the other's."""
    spec = FlowTDMR1(samples=2, fake_updates=1, denoising=FewSteps(steps=1))
    small = {"surrogate": af.sgd(SGDSpec(lr=1e-3, max_grad_norm=0.0, weight_decay=0.0, momentum=0.0), 10)}
    algorithm, state = taught(spec, small)
    batch = drawn(algorithm, state)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    after, _ = algorithm.step(state, worth(batch, rewards))

    def error(params: Any) -> torch.Tensor:
        key = KEY.fold("surrogate").fold(1).fold(0)
        low, high = torch.full((6,), 0.02), torch.full((6,), 0.98)
        level = times_between(Times(low=0.02, high=0.98), key.fold("level"), batch.groups, low, high)
        noise = latent_noise(key.fold("noise"), batch.groups, (1, 4, 4))
        x = (1 - column(level)) * batch.final + column(level) * noise
        v = POLICY.velocity(params, x, 1000 * level, batch.conditions.positive)
        return (v - (noise - batch.final)).square().mean((1, 2, 3))

    change = error(after.params["surrogate"]) - error(state.params["surrogate"])
    assert (change * (rewards - 0.5)).sum() < 0


# ------------------------------------------------------------------------------------------ on-policy distillation


@pytest.mark.parametrize(("dynamics", "level", "space"), [("ode", 0.0, "velocity"), ("flow_sde", 0.6, "gaussian")])
def test_a_student_that_is_its_teacher_learns_nothing(dynamics: Any, level: float, space: Any) -> None:
    spec = FlowDistill(denoising=StudentDenoising(steps=3, dynamics=dynamics, level=level), space=space)
    algorithm, state = taught(spec)
    after, metrics = algorithm.step(state, drawn(algorithm, state))
    assert metrics["train/loss"] == metrics["train/grad_norm"] == metrics["flow/kl"] == 0
    assert tree.equal(after.params, state.params)
    assert after.counters.optimizer_step == after.counters.rollout_iteration == 1


@pytest.mark.parametrize("dynamics", ["ode", "flow_sde"])
def test_guidance_becomes_the_student_s_own_by_autograd(dynamics: Any) -> None:
    """The distance of v from v- + 3 (v+ - v-) over all states that steps began at; of noisy steps, over 2 std^2 of the means."""
    noisy = dynamics != "ode"
    levels = StudentDenoising(steps=3, dynamics=dynamics, level=0.6 if noisy else 0.0)
    spec = FlowDistill(teacher_guidance=3.0, denoising=levels, space="gaussian" if noisy else "velocity")
    algorithm, state = taught(spec)
    batch = drawn(algorithm, state)
    labels, sigmas = batch.conditions.positive, batch.schedule.sigmas.tolist()
    steps = (0, 1) if noisy else (0, 1, 2)

    def loss(params: Any) -> torch.Tensor:
        total = torch.zeros(())
        for step in steps:
            x, sigma, after = batch.state(step), sigmas[step], sigmas[step + 1]
            time = torch.full((3,), 1000 * sigma)
            v, away = (
                POLICY.velocity(state.params["actor"], x, time, label).detach()
                for label in (labels, torch.full_like(labels, 3))
            )
            apart = (POLICY.velocity(params, x, time, labels) - (away + 3 * (v - away))).square().mean()
            if noisy:
                g = 0.6 * math.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
                std, dt = g * math.sqrt(sigma - after), after - sigma
                # of the mean x + (v + g^2 / (2 sigma) (x + (1 - sigma) v)) dt
                moves = (1 + g**2 / (2 * sigma) * (1 - sigma)) * dt
                apart = apart * moves**2 / (2 * std**2)
            total = total + apart / len(steps)
        return total

    student = by_autograd(state.params["actor"], loss)
    after, metrics = algorithm.step(state, batch)
    close(after.params["actor"], student)
    assert metrics["train/loss"] == pytest.approx(float(loss(state.params["actor"]).detach()), rel=1e-3)
    assert metrics["train/loss"] == pytest.approx(metrics["flow/kl"])


def test_a_student_comes_nearer_to_a_teacher_of_another_size() -> None:
    policy = DiTPolicy(DiTConfig(num_classes=3, sample_size=4, num_layers=2, num_heads=1, head_dim=8))
    teacher = tree.map_with_path(
        lambda path, x: x + 0.2 * af.random.normal(KEY.fold(path), torch.arange(x.numel())).reshape(x.shape),
        init(policy.config, KEY),
    )
    spec = FlowDistill(samples=4, teacher="folder", denoising=StudentDenoising(steps=3))
    algorithm, state = taught(spec, {"actor": af.adamw(AdamWSpec(lr=1e-2), 20)}, (policy, teacher))
    told = []
    for _ in range(12):
        state, metrics = algorithm.step(state, drawn(algorithm, state))
        told.append(metrics["train/loss"])
    assert told[-1] < 0.6 * told[0] and tree.equal(state.params["teacher"], teacher)


def test_each_teacher_is_asked_about_its_own_data_set() -> None:
    """Prompts 0 to 2 of four rows are of `a`, `b` and `a`, prompt 6 is row 2 again: the loss is the mean over all their steps."""
    policies = {
        role: DiTPolicy(DiTConfig(num_classes=3, sample_size=4, num_layers=n, num_heads=1, head_dim=8))
        for n, role in ((1, "first"), (2, "second"))
    }
    params = {
        role: tree.map_with_path(
            lambda path, x: x + 0.2 * af.random.normal(KEY.fold(path), torch.arange(x.numel())).reshape(x.shape),
            init(policy.config, KEY.fold(role)),
        )
        for role, policy in policies.items()
    }
    teachers = [Teacher(path="one", data=["a"]), Teacher(path="two", data=["b", "c"])]
    spec = FlowDistill(teachers=teachers, denoising=StudentDenoising(steps=2))
    algorithm, state = taught(
        spec,
        teachers={
            path: Teaching(role=role, policy=policies[role]) for path, role in (("one", "first"), ("two", "second"))
        },
        sources=("a", "b", "a", "c"),
    )
    state = replace(state, params={**state.params, **params})
    assert state.snapshots == {} and algorithm.sample is not None
    asked = replace(prompts(4), ids=torch.tensor([0, 1, 2, 6]))
    batch = algorithm.sample(state, asked)
    roles, labels = ("first", "second", "first", "first"), batch.conditions.positive
    total = 0.0
    for step, sigma in enumerate(batch.schedule.sigmas[:2].tolist()):
        for row, role in enumerate(roles):
            x, label, time = batch.state(step)[row : row + 1], labels[row : row + 1], torch.tensor([1000 * sigma])
            with torch.no_grad():
                theirs = policies[role].velocity(params[role], x, time, label)
                ours = POLICY.velocity(state.params["actor"], x, time, label)
            total += float((ours - theirs).square().mean()) / 8
    after, metrics = algorithm.step(state, batch)
    assert metrics["train/loss"] == pytest.approx(total, rel=1e-4)
    assert all(tree.equal(after.params[role], params[role]) for role in policies)
    alone = algorithm.sample(
        state, replace(asked, conditions=tree.map(lambda x: x[:1], asked.conditions), ids=asked.ids[:1])
    )
    _, metrics = algorithm.step(state, alone)
    assert metrics["train/loss"] > 0, "a batch may have nothing for one of the teachers"
