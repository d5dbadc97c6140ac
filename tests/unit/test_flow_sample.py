"""Sampling and scoring: what is stored, what is recomputed, and what every draw depends on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flow_models import SHAPE, Field, numbers, parameters, prompts

from areno_fn import tree
from areno_fn.contracts.errors import DataError, RecordError, SpecError
from areno_fn.contracts.flow import Conditions, FlowPrompts, Process, Trajectory
from areno_fn.contracts.flow_batch import Denoising
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.steps.compose import accumulate, pipeline
from areno_fn.steps.flow.noise import latent_noise, noise_levels, noisy_subset, noisy_window
from areno_fn.steps.flow.parts import limited
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.schedule import flow_match, late
from areno_fn.steps.flow.score import act_flow, denoising, move, recall
from areno_fn.steps.flow.unipc import unipc_schedule
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.testing import laws

POLICY, PARAMS, KEY = Field(), parameters(), Key.of(5)
SCHEDULE = flow_match(6, shift=3.0)
NOISY = ("flow_sde", "dance_sde", "cps")


def rollout(process: Process, given: FlowPrompts | None = None, **fields: Any) -> Trajectory:
    given = prompts(negative=process.guidance > 1) if given is None else given
    levels = fields.pop("levels", noise_levels(6, None if process.dynamics != "ode" else ()))
    return flow_sampler(POLICY, process)(PARAMS, given, KEY, SCHEDULE, levels, **fields)


def distance(params: Any, batches: tuple[Denoising, ...]) -> float:
    """The largest difference of a log-probability from the recorded one."""
    return max(float((act_flow(POLICY)(params, b).logp - b.old).abs().max()) for b in batches)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("dynamics", NOISY)
def test_training_recomputes_what_the_rollout_recorded(dynamics: Any, guidance: float) -> None:
    """Exactly 0 in the batch of the rollout, and at most 1e-5 in another."""
    drawn = rollout(Process(dynamics=dynamics, guidance=guidance), samples=4)
    advantages = torch.zeros(12)
    assert drawn.logp.shape == (12, 5) and drawn.logp.isfinite().all()
    assert distance(PARAMS, denoising(drawn, advantages)) == 0.0
    assert distance(PARAMS, denoising(drawn, advantages, micro=5)) <= 1e-5
    assert distance(PARAMS, denoising(drawn, advantages, rows=torch.tensor([7, 2]))) <= 1e-5


@pytest.mark.parametrize("over", ["mean", "sum"])
@pytest.mark.parametrize("likelihood", ["gaussian", "unscaled"])
def test_every_reduction_is_recomputed(over: Any, likelihood: Any) -> None:
    drawn = rollout(Process(dynamics="cps", over=over, likelihood=likelihood))
    assert distance(PARAMS, denoising(drawn, torch.zeros(3))) == 0.0


def test_half_precision_states_are_rounded_before_they_are_scored() -> None:
    drawn = rollout(Process(), dtype=torch.bfloat16)
    assert drawn.states.dtype == drawn.final.dtype == torch.bfloat16
    assert distance(PARAMS, denoising(drawn, torch.zeros(3))) == 0.0
    taken = drawn.state(1).float()
    assert (
        distance(PARAMS, tuple(replace(b, taken=b.taken.float() + 1e-3) for b in denoising(drawn, torch.zeros(3)))) > 0
    )
    assert torch.equal(taken, taken.bfloat16().float())


@pytest.mark.parametrize(
    "broken",
    [
        lambda b: replace(b, state=b.state + 1e-2),
        lambda b: replace(b, taken=b.taken + 1e-2),
        lambda b: replace(b, interval=replace(b.interval, sigma=b.interval.sigma * 0.99)),
        lambda b: replace(b, interval=replace(b.interval, next_sigma=b.interval.next_sigma * 0.99)),
        lambda b: replace(b, interval=replace(b.interval, level=b.interval.level * 0.99)),
        lambda b: replace(b, interval=replace(b.interval, timestep=b.interval.timestep * 0.99)),
        lambda b: replace(b, conditions=replace(b.conditions, positive=b.conditions.positive + 0.01)),
        lambda b: replace(b, conditions=replace(b.conditions, negative=b.conditions.negative + 0.01)),
        lambda b: replace(b, process=Process(guidance=2.1)),
        lambda b: replace(b, process=Process(guidance=2.0, dynamics="dance_sde")),
        lambda b: replace(b, process=Process(guidance=2.0, dynamics="cps")),
        lambda b: replace(b, process=Process(guidance=2.0, over="sum")),
    ],
)
def test_anything_else_than_what_was_sampled_is_noticed(broken: Any) -> None:
    drawn = rollout(Process(guidance=2.0))
    batches = denoising(drawn, torch.zeros(3), steps=[2])
    assert distance(PARAMS, batches) == 0.0
    assert distance(PARAMS, tuple(broken(b) for b in batches)) > 1e-4


def test_other_parameters_are_noticed() -> None:
    batches = denoising(rollout(Process()), torch.zeros(3))
    assert distance(tree.map(lambda x: x * 1.01, PARAMS), batches) > 1e-4


def test_a_sample_does_not_depend_on_its_batch() -> None:
    whole = rollout(Process(), prompts(3), samples=2)
    for row in range(3):
        alone = rollout(Process(), prompts(1, first=10 + row), samples=2)
        assert alone.ids.tolist() == whole.ids[2 * row : 2 * row + 2].tolist() == [2 * (10 + row), 2 * (10 + row) + 1]
        assert torch.allclose(alone.final, whole.final[2 * row : 2 * row + 2], atol=1e-5)
        assert torch.allclose(alone.logp, whole.logp[2 * row : 2 * row + 2], atol=1e-5)
    assert not torch.allclose(whole.final[0], whole.final[1], atol=0.1)


def test_noise_differs_by_key_id_step_and_element() -> None:
    ids = torch.arange(2)
    draws = [latent_noise(Key.of(k), ids, SHAPE, step) for k in range(2) for step in range(3)]
    assert len(set(torch.stack(draws).flatten().tolist())) == 2 * 3 * 2 * 6
    assert torch.equal(latent_noise(KEY, ids.flip(0), SHAPE, 1), latent_noise(KEY, ids, SHAPE, 1).flip(0))


def test_every_step_draws_noise_of_its_own() -> None:
    """What a step added to its mean, over its deviation, is the noise of (key, id, step), and no two are alike."""
    drawn = rollout(Process(dynamics="dance_sde"))
    added = []
    for step, batch in enumerate(denoising(drawn, torch.zeros(3))):
        now = move(POLICY)(PARAMS, batch).now
        added.append((batch.taken - now.mean) / now.std[:, None, None])
        assert torch.allclose(added[-1], latent_noise(KEY.fold("step"), drawn.ids, SHAPE, step), atol=1e-4)
    assert len({round(x, 4) for x in torch.stack(added).flatten().tolist()}) == 5 * 3 * 6
    start = latent_noise(KEY.fold("start"), drawn.ids, SHAPE)
    assert torch.equal(drawn.state(0), start) and not torch.allclose(start, added[0], atol=1e-2)


def test_sampling_is_pure() -> None:
    sampler = flow_sampler(POLICY, Process(dynamics="cps"))
    laws.pure(sampler, PARAMS, prompts(2), KEY, SCHEDULE, noise_levels(6, [1, 3]))


# ------------------------------------------------------------------------------------------ what is stored


def test_exactly_the_states_of_the_chosen_steps_are_stored() -> None:
    drawn = rollout(Process(), keep=[1, -2, 1])
    assert drawn.state_map == (-1, 0, 1, -1, 2, 3, -1) and drawn.states.shape == (3, 4, *SHAPE)
    assert drawn.transition_map == (-1, 0, -1, -1, 1, -1) and drawn.logp.shape == (3, 2)
    everything = rollout(Process(), keep=range(6))
    assert everything.state_map == tuple(range(7))
    for index in (1, 2, 4, 5):
        assert torch.equal(drawn.state(index), everything.state(index))
    assert torch.equal(drawn.recorded(4), everything.recorded(4))
    assert torch.equal(everything.state(6), drawn.final) and torch.equal(everything.state(-1), drawn.final)


def test_steps_without_noise_are_stored_but_not_scored() -> None:
    drawn = rollout(Process(), levels=noise_levels(6, [2]), keep=range(6))
    assert drawn.transition_map == (-1, -1, 0, -1, -1, -1) and drawn.states.shape[1] == 7
    nothing = rollout(Process(), keep=[])
    assert nothing.states.shape == (3, 0, *SHAPE) and set(nothing.state_map) == {-1}
    assert torch.equal(nothing.final, rollout(Process()).final)


def test_what_was_not_stored_cannot_be_read() -> None:
    drawn = rollout(Process(), keep=[1])
    with pytest.raises(RecordError, match=r"state 0 was not stored; this Trajectory keeps \[1, 2\]"):
        drawn.state(0)
    with pytest.raises(RecordError, match=r"the log-probability of step 3 was not stored; this Trajectory keeps \[1\]"):
        drawn.recorded(3)
    with pytest.raises(RecordError, match="state 7 was not stored"):
        drawn.state(7)


def test_noise_is_added_at_chosen_steps_alone() -> None:
    """With noise at step 2 alone, two keys part after it, and every other step is that of the ODE."""
    levels = noise_levels(6, [2])
    first = rollout(Process(), levels=levels, keep=range(6))
    straight = rollout(Process(dynamics="ode"), keep=range(6))
    for index in (0, 1, 2):
        assert torch.equal(first.state(index), straight.state(index))
    assert not torch.allclose(first.state(3), straight.state(3), atol=1e-2)


def test_the_ode_is_euler() -> None:
    drawn = rollout(Process(dynamics="ode"))
    x = latent_noise(KEY.fold("start"), drawn.ids, SHAPE)
    for step in range(6):
        sigma, after = SCHEDULE.sigmas[step], SCHEDULE.sigmas[step + 1]
        x = x + (after - sigma) * POLICY.velocity(PARAMS, x, (sigma * 1000).expand(3), drawn.conditions.positive)
    assert torch.allclose(drawn.final, x, atol=1e-6)


def test_unipc_samples_the_same_ode_in_fewer_steps() -> None:
    """12 steps of UniPC are nearer to 400 of Euler than 12 of Euler are."""
    given = prompts()

    def final(solver: Any, steps: int) -> torch.Tensor:
        schedule = unipc_schedule(steps) if solver == "unipc" else flow_match(steps)
        sample = flow_sampler(POLICY, Process(dynamics="ode", solver=solver))
        return sample(PARAMS, given, KEY, schedule, noise_levels(steps, ()), keep=[1]).final

    truth = final("euler", 400)
    near, far = ((final(solver, 12) - truth).abs().max() for solver in ("unipc", "euler"))
    assert near < 0.2 * far
    with pytest.raises(SpecError, match="levels below 1, as unipc_schedule makes them"):
        sample = flow_sampler(POLICY, Process(dynamics="ode", solver="unipc"))
        sample(PARAMS, given, KEY, flow_match(4), noise_levels(4, ()))
    with pytest.raises(SpecError, match="steps >= 1 and shift > 0"):
        unipc_schedule(0)


def test_sampling_may_begin_near_given_latents() -> None:
    whole, clean = flow_match(4), numbers("clean", 3, *SHAPE)
    schedule = late(whole, 0.6)
    assert torch.equal(schedule.sigmas, whole.sigmas[2:]) and torch.equal(schedule.timesteps, whole.timesteps[2:])
    given = replace(prompts(), begin=clean)
    sample = flow_sampler(POLICY, Process(dynamics="ode"))
    drawn = sample(PARAMS, given, KEY, schedule, noise_levels(2, ()), samples=2, keep=[0])
    noise = latent_noise(KEY.fold("start"), drawn.ids, SHAPE)
    assert torch.allclose(drawn.state(0), 0.5 * clean.repeat_interleave(2, 0) + 0.5 * noise, atol=1e-6)
    plain = sample(PARAMS, prompts(), KEY, whole, noise_levels(4, ()), keep=[0])
    assert torch.equal(sample(PARAMS, given, KEY, late(whole, 1.0), noise_levels(4, ())).final, plain.final)
    with pytest.raises(SpecError, match="leaves a step of 4, received 0.2"):
        late(whole, 0.2)
    with pytest.raises(DataError, match=r"the latents to begin near must be \[3, 2, 3\], received \[3, 6\]"):
        sample(PARAMS, replace(given, begin=clean.flatten(1)), KEY, whole, noise_levels(4, ()))


def test_guidance_leads_away_from_the_negative_condition() -> None:
    given = prompts(2, negative=True)
    guided = flow_sampler(POLICY, Process(dynamics="ode", guidance=3.0))
    levels, one = noise_levels(1, ()), flow_match(1)
    final = guided(PARAMS, given, KEY, one, levels).final
    start, time = latent_noise(KEY.fold("start"), given.ids, SHAPE), torch.full((2,), 1000.0)
    towards = POLICY.velocity(PARAMS, start, time, given.conditions.positive)
    away = POLICY.velocity(PARAMS, start, time, given.conditions.negative)
    assert torch.allclose(final, start - (away + 3 * (towards - away)), atol=1e-5)


def test_L12_masked_elements_get_no_noise_and_are_not_scored() -> None:
    mask = torch.ones(3, *SHAPE, dtype=torch.bool)
    mask[:, 0, 1] = False
    given = replace(prompts(), mask=mask)
    drawn = rollout(Process(), given, levels=noise_levels(6, [0]), keep=range(6))
    assert drawn.states[:, :, 0, 1].abs().max() == 0.0 and drawn.states[:, :, mask[0]].abs().min() > 0
    (batch,) = denoising(drawn, torch.zeros(3))
    assert distance(PARAMS, (batch,)) == 0.0
    other = replace(batch, taken=torch.where(batch.mask, batch.taken, math.nan))
    assert distance(PARAMS, (other,)) == 0.0


def test_steps_are_chosen_by_the_key() -> None:
    subsets = {noisy_subset(Key.of(i), range(5), 2) for i in range(200)}
    assert subsets == {(i, j) for i in range(5) for j in range(i + 1, 5)}
    assert {noisy_window(Key.of(i), range(1, 5), 2) for i in range(100)} == {(1, 2), (2, 3), (3, 4)}
    assert noisy_subset(KEY, range(5), 5) == (0, 1, 2, 3, 4)
    assert noise_levels(4, None, 0.5).tolist() == [0.5, 0.5, 0.5, 0.0]
    assert noise_levels(4, [-1, 0, 0], 0.5).tolist() == [0.5, 0.0, 0.0, 0.5]


# ------------------------------------------------------------------------------------------ Flow-GRPO


def losses(params: Any, batches: tuple[Denoising, ...], **bounds: float) -> tuple[Any, dict[str, float]]:
    gradient, sums = accumulate(pipeline(act_flow(POLICY), clipped(1e-4, 1e-4, **bounds)))(params, batches)
    stats = {name: float(x[0] / x[1]) for name, x in sums.stats.items() if x.shape == (2,)}
    return gradient, {"loss": float(sums.total / sums.weight), **stats, **{k: float(v) for k, v in sums.peaks.items()}}


def test_before_the_first_update_the_ratio_is_exactly_1() -> None:
    drawn = rollout(Process(), samples=4)
    advantages = numbers("advantage", 12)
    _, numbers_of = losses(PARAMS, denoising(drawn, advantages))
    assert numbers_of["ratio_mean"] == numbers_of["ratio_max"] == 1.0 and numbers_of["clip_fraction"] == 0.0
    assert numbers_of["loss"] == pytest.approx(-float(advantages.mean()), abs=1e-6)


def test_R9_every_sample_and_step_is_one_term_of_one_mean() -> None:
    """4 samples x 5 steps: one gradient, the mean over 20 terms, however they are laid into micro-batches."""
    drawn = rollout(Process(), prompts(2), samples=2)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0])
    params = {name: value.clone().requires_grad_() for name, value in PARAMS.items()}
    terms = []
    for batch in denoising(drawn, advantages):
        ratio = (act_flow(POLICY)(params, batch).logp - batch.old).exp()
        terms += list(-ratio * batch.advantage)
    assert len(terms) == 20
    expected = torch.autograd.grad(torch.stack(terms).mean(), list(params.values()))
    for micro in (None, 1, 3):
        gradient, _ = losses(PARAMS, denoising(drawn, advantages, micro=micro))
        for received, right in zip(tree.leaves(gradient), expected, strict=True):
            assert torch.allclose(received, right, atol=1e-6)


def test_the_objective_is_exact_under_split_and_differentiable() -> None:
    drawn = rollout(Process(), samples=2)
    advantages = numbers("advantage", 6)
    (whole,) = denoising(drawn, advantages, steps=[2])
    halves = denoising(drawn, advantages, steps=[2], micro=2)
    objective = pipeline(act_flow(POLICY), clipped(0.2, 0.2))
    laws.exact_under_split(objective, PARAMS, whole, halves)
    laws.gradient(objective, tree.map(lambda x: x * 1.001, PARAMS), whole)


def test_transitions_of_frozen_parameters_are_the_same_bits() -> None:
    (batch,) = denoising(rollout(Process()), torch.zeros(3), steps=[1])
    batch = recall(POLICY, batch, before=PARAMS, reference=PARAMS)
    moves = move(POLICY)(PARAMS, batch)
    assert torch.equal(moves.now.mean, batch.before.mean) and torch.equal(moves.now.velocity, batch.reference.velocity)
    assert torch.equal(moves.actions.logp, batch.old) and not batch.before.mean.requires_grad


# ------------------------------------------------------------------------------------------ refusals


def test_mistakes_are_refused() -> None:
    drawn = rollout(Process(), levels=noise_levels(6, [1, 2]), keep=[0, 1, 2])
    with pytest.raises(RecordError, match="steps with and without noise together"):
        denoising(drawn, torch.zeros(3), steps=[0, 1])
    with pytest.raises(RecordError, match=r"advantages is f32\[4\], but the trajectory has 3 rows"):
        denoising(drawn, torch.zeros(4))
    with pytest.raises(RecordError, match="no step; name steps that the trajectory stored"):
        denoising(rollout(Process(dynamics="ode")), torch.zeros(3))
    (batch,) = denoising(drawn, torch.zeros(3), steps=[0])
    with pytest.raises(RecordError, match="steps without noise have no log-probability"):
        act_flow(POLICY)(PARAMS, batch)
    with pytest.raises(RecordError, match="guidance of 2.0 needs Conditions.negative"):
        flow_sampler(POLICY, Process(guidance=2.0))(PARAMS, prompts(), KEY, SCHEDULE, noise_levels(6, None))
    twice = FlowPrompts(conditions=Conditions(positive=torch.zeros(2, 4)), ids=torch.tensor([7, 7]))
    with pytest.raises(DataError, match="two prompts have the id 7"):
        rollout(Process(), twice)


@pytest.mark.parametrize(
    ("process", "levels", "words"),
    [
        (Process(), torch.zeros(5), "a schedule of 6 steps needs 6 noise levels"),
        (Process(dynamics="ode"), noise_levels(6, [3]), "the dynamics 'ode' adds no noise, but step 3"),
        (Process(dynamics="cps"), noise_levels(6, [5]), "and none for a last step that ends at the data"),
        (Process(dynamics="cps"), noise_levels(6, [0], 1.5), "takes levels up to 1"),
    ],
)
def test_levels_that_do_not_fit_are_refused(process: Process, levels: torch.Tensor, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        rollout(process, levels=levels)


def test_steps_that_do_not_exist_are_refused() -> None:
    for call in (lambda: noise_levels(6, [6]), lambda: noise_levels(6, None, 0.0), lambda: noisy_subset(KEY, [1], 2)):
        with pytest.raises(SpecError):
            call()
    with pytest.raises(SpecError, match="a window of 4 steps does not fit into 3"):
        noisy_window(KEY, range(3), 4)
    with pytest.raises(SpecError, match="steps >= 1 and shift > 0"):
        flow_match(0)
    with pytest.raises(SpecError, match="stretched to a terminal level between 0 and 1"):
        flow_match(4, terminal=1.0)


@pytest.mark.parametrize("most", [1, 4, 7, 100])
def test_a_part_of_the_prompts_at_a_time_draws_the_same(most: int) -> None:
    """Rows, states and log-probabilities of a rollout with noise, and of one by the ODE that stores nothing."""
    asked, schedule = prompts(5, negative=True), flow_match(4)
    process, levels = Process(dynamics="flow_sde", guidance=2.0), noise_levels(4, [0, 2], 0.6)
    rollout = flow_sampler(Field(), process)
    whole = rollout(parameters(), asked, Key.of(3), schedule, levels, samples=2)
    parts = limited(rollout, most)(parameters(), asked, Key.of(3), schedule, levels, samples=2)
    for name in ("ids", "groups"):
        assert torch.equal(getattr(parts, name), getattr(whole, name))
    for name in ("final", "states", "logp"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), atol=1e-6, rtol=1e-5)
    assert torch.equal(parts.conditions.negative, whole.conditions.negative)
    assert (parts.state_map, parts.transition_map, parts.process) == (whole.state_map, whole.transition_map, process)
    ode = flow_sampler(Field(), Process(dynamics="ode"))
    final = limited(ode, most)(parameters(), asked, Key.of(3), schedule, torch.zeros(4), samples=2).final
    expected = ode(parameters(), asked, Key.of(3), schedule, torch.zeros(4), samples=2).final
    torch.testing.assert_close(final, expected, atol=1e-6, rtol=1e-5)


def test_names_are_distinct_over_all_parts() -> None:
    twice = prompts(3)
    twice = FlowPrompts(conditions=twice.conditions, ids=torch.tensor([5, 6, 5]))
    with pytest.raises(DataError, match="two prompts have the id 5"):
        limited(flow_sampler(Field(), Process(dynamics="ode")), 1)(
            parameters(), twice, Key.of(3), flow_match(2), torch.zeros(2)
        )
