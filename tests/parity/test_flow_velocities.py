"""Velocities of large flow models against the pipelines and modules of diffusers, with small random weights."""

from __future__ import annotations

import pytest
import torch
from flow_loops import PIPELINES, STEPS, Forward, Made, Params, small_pictures


@pytest.fixture(scope="module", params=PIPELINES)
def made(request: pytest.FixtureRequest) -> Made:
    return PIPELINES[request.param]()


def transformers(made: Made) -> list[torch.nn.Module]:
    parts = (made.pipeline.transformer, getattr(made.pipeline, "transformer_2", None))
    return [part for part in parts if part is not None]


def forwards(made: Made, params: list[Params]) -> tuple[Forward, ...]:
    def call(module: torch.nn.Module, values: Params) -> Forward:
        return lambda *args, **kwargs: torch.func.functional_call(module, dict(values), args, kwargs)

    return tuple(call(module, values) for module, values in zip(transformers(made), params, strict=True))


def stored(made: Made) -> list[Params]:
    return [dict(part.state_dict()) for part in transformers(made)]


def test_the_loop_reaches_the_latents_of_the_pipeline(made: Made) -> None:
    with small_pictures():
        out = made.pipeline(**made.arguments, num_inference_steps=STEPS, output_type="latent", return_dict=False)
    scheduler, state, ask = made.pipeline.scheduler, made.start, forwards(made, stored(made))
    with torch.no_grad():
        for step, time in enumerate(scheduler.timesteps):
            velocity = made.velocity(ask, state, time.expand(state.shape[0]))
            state = state + (scheduler.sigmas[step + 1] - scheduler.sigmas[step]) * velocity
    reached, expected = made.ours(state), made.latents(out)
    assert reached.shape == expected.shape
    assert float((reached - expected).abs().max()) <= 10 * made.same
    assert float(expected.std()) > 0.1


def test_gradients_are_those_of_autograd(made: Made) -> None:
    times = torch.full((made.start.shape[0],), 900.0)
    leaves = stored(made)[0]
    rest = stored(made)[1:]

    def loss(params: Params) -> torch.Tensor:
        return made.velocity(forwards(made, [params, *rest]), made.start, times).square().sum()

    value, pull = torch.func.vjp(loss, leaves)
    (ours,) = pull(torch.ones_like(value), retain_graph=False, create_graph=False)
    known = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    theirs = dict(zip(known, torch.autograd.grad(loss(known), list(known.values()), allow_unused=True), strict=True))
    assert sum(bool(x.abs().sum() > 0) for x in ours.values()) > len(ours) // 2
    for name, gradient in ours.items():
        other = theirs[name]
        assert torch.equal(gradient, torch.zeros_like(gradient) if other is None else other), name
