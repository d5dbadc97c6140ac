"""Donated and captured steps on a CUDA device: bits, memory, and no waiting in between."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from e2e import tiny

import areno_fn as af
from areno_fn import tree
from areno_fn.contracts.spec import AdamWSpec, RunSpec
from areno_fn.engine import loop
from areno_fn.engine.plan import plan
from areno_fn.engine.start import initial_state
from areno_fn.steps import compose

pytestmark = pytest.mark.gpu
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
FAMILY = af.FAMILIES["qwen3"]


def made(states: Any, **options: Any) -> tuple[Any, af.TrainState]:
    config = FAMILY.config_from_hf(CONFIG)
    params = FAMILY.init(config, af.Key.of(0), dtype=torch.bfloat16, device="cuda")
    optimizer = af.adamw(AdamWSpec(lr=1e-3, states=states), total_steps=100)
    objective = af.pipeline(af.score(FAMILY.policy(config), af.Sampling()), af.cross_entropy())
    state = af.TrainState(
        params={"actor": params},
        optim={"actor": optimizer.init(params)},
        snapshots={},
        counters=af.Counters(),
        key=af.Key.of(0),
        cursor=af.Cursor(),
    )
    return af.train_step(objective, optimizer, **options), state


def batch(number: int, lengths: tuple[int, ...] = (64, 64)) -> Any:
    source = torch.Generator().manual_seed(number)
    texts = [torch.randint(0, 512, (n,), generator=source).tolist() for n in lengths]
    rows = [af.Example(tokens=tuple(text), trained=(False, *[True] * (len(text) - 1))) for text in texts]
    return tree.map(lambda x: x.to("cuda"), af.pack(rows))


@pytest.mark.parametrize("states", ["float32", "stored"])
@pytest.mark.parametrize("capture", [False, True])
def test_the_pure_step_bit_for_bit(states: str, capture: bool) -> None:
    """Over shapes that take turns, of one micro-batch and of two; a second graph must not disturb the first."""
    pure, want = made(states)
    giving, got = made(states, donate=True, capture=capture)
    lengths = [((64, 64),), ((100, 28, 60),), ((64, 64), (100, 28, 60))]
    for step in range(12):
        micro = tuple(batch(step, one) for one in lengths[step % 3])
        want, told = pure(want, micro)
        got, also = giving(got, micro)
        assert told == also, step
        difference = tree.first_difference(want, got)
        assert difference is None, (step, difference)


@pytest.mark.parametrize("capture", [False, True])
def test_parameters_masters_and_moments_are_there_once(capture: bool) -> None:
    step, state = made("float32", donate=True, capture=capture)
    places = [x.data_ptr() for x in tree.leaves((state.params, state.optim)) if x.numel() > 1]
    for number in range(4):
        state, _ = step(state, (batch(number),))
    assert [x.data_ptr() for x in tree.leaves((state.params, state.optim)) if x.numel() > 1] == places


def test_a_state_from_elsewhere_is_captured_anew() -> None:
    """A loaded state, or one that a pure step made, does not lie where the graph looks."""
    step, state = made("float32", donate=True, capture=True)
    pure, want = made("float32")
    for number in range(6):
        state, told = step(state, (batch(number),))
        want, also = pure(want, (batch(number),))
        assert told == also
        if number == 3:
            state = tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
    assert tree.equal(state, want)


@pytest.fixture
def waiting_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any wait for the device is an error, but for the one that fetches the metrics of a step."""

    def fetched(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return finish(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    finish = compose.finish
    monkeypatch.setattr(compose, "finish", fetched)
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("options", [{}, {"donate": True}, {"donate": True, "capture": True}], ids=str)
def test_a_step_waits_for_its_metrics_alone(options: dict[str, bool], waiting_once: None) -> None:
    step, state = made("float32", **options)
    pair = (batch(0), batch(1, (100, 28)))
    for _ in range(3):
        state, _ = step(state, pair)
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(2):
        state, metrics = step(state, pair)
    assert metrics["train/loss"] > 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_step_of_the_loop_waits_for_its_metrics_alone(waiting_once: None) -> None:
    """Batches go to the device through page-locked memory."""
    made = plan(msgspec.convert(tomllib.loads(tiny.SPEC.replace('device = "cpu"', 'device = "cuda"')), RunSpec))
    phase = made.phases[0]
    state = phase.algorithm.begin(initial_state(made))
    for _ in range(2):
        state, _ = loop._dataset_step(made, phase, state)
    torch.cuda.set_sync_debug_mode("error")
    state, metrics = loop._dataset_step(made, phase, state)
    assert metrics["train/loss"] > 0


def test_full_remat_has_the_same_gradients() -> None:
    step, state = made("float32", donate=True)
    config = FAMILY.config_from_hf(CONFIG)
    policy = FAMILY.policy(config).computing_again(1)
    objective = af.pipeline(af.score(policy, af.Sampling()), af.cross_entropy())
    again = af.train_step(objective, af.adamw(AdamWSpec(lr=1e-3), total_steps=100), donate=True)
    other = tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
    for number in range(2):
        state, told = step(state, (batch(number),))
        other, also = again(other, (batch(number),))
        assert told == also
    assert tree.equal(state, other)
