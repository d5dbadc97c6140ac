"""The DiT among the parts of the library: its layout, adapters, replay, and that it learns."""

from __future__ import annotations

import pytest
import torch
from flow_models import numbers

from areno_fn import tree
from areno_fn.contracts.errors import RecordError, SpecError
from areno_fn.contracts.flow import Conditions, FlowPrompts, Process
from areno_fn.contracts.key import Key
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.spec import AdamWSpec
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.models import adapters
from areno_fn.models.adapter_sites import chosen
from areno_fn.models.digits_dit import DiTConfig
from areno_fn.models.digits_dit.checkpoint import layout, placements
from areno_fn.models.digits_dit.model import DiT, DiTPolicy, init
from areno_fn.steps.advantages import group_advantages
from areno_fn.steps.compose import pipeline, train_step
from areno_fn.steps.flow.conditions import dropped
from areno_fn.steps.flow.noise import noise_levels
from areno_fn.steps.flow.objectives.matching import velocity_matching
from areno_fn.steps.flow.path import noised, predict
from areno_fn.steps.flow.sample import flow_sampler
from areno_fn.steps.flow.schedule import flow_match
from areno_fn.steps.flow.score import act_flow, denoising
from areno_fn.steps.flow.times import Times
from areno_fn.steps.objectives.clipped import clipped
from areno_fn.steps.optimizers import adamw
from areno_fn.testing import laws
from areno_fn.testing.layouts import layout_agrees, placements_agree

CONFIG = DiTConfig(num_classes=2, sample_size=4, patch_size=2, num_layers=2, num_heads=2, head_dim=12)
POLICY = DiTPolicy(CONFIG)
QKV = ("q", "k", "v")


def trained() -> DiT:
    """Parameters of which every part matters."""
    return tree.map_with_path(lambda path, x: x + numbers(path, *x.shape, scale=0.05), init(CONFIG, Key.of(0)))


def plain(file: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The leaves, by indexing."""
    weights = {"patch": "pos_embed.proj", "last": "proj_out_1", "out": "proj_out_2"}
    for n in range(CONFIG.num_layers):
        names = {
            "time_in": "norm1.emb.timestep_embedder.linear_1", "time_out": "norm1.emb.timestep_embedder.linear_2",
            "modulation": "norm1.linear", "o": "attn1.to_out.0", "up": "ff.net.0.proj", "down": "ff.net.2",
        }  # fmt: skip
        weights |= {f"blocks.{n}.{leaf}": f"transformer_blocks.{n}.{name}" for leaf, name in names.items()}
    leaves = {leaf: file[f"{name}.weight"] for leaf, name in weights.items()}
    leaves |= {f"{leaf}_bias": file[f"{name}.bias"] for leaf, name in weights.items()}
    leaves["patch"] = leaves["patch"].flatten(1)
    for n in range(CONFIG.num_layers):
        block = f"transformer_blocks.{n}."
        leaves[f"blocks.{n}.classes"] = file[f"{block}norm1.emb.class_embedder.embedding_table.weight"]
        leaves[f"blocks.{n}.qkv"] = torch.cat([file[f"{block}attn1.to_{x}.weight"] for x in QKV])
        leaves[f"blocks.{n}.qkv_bias"] = torch.cat([file[f"{block}attn1.to_{x}.bias"] for x in QKV])
    return leaves


def test_the_layout_puts_every_element_where_it_belongs() -> None:
    laws.iso_roundtrip(layout(CONFIG))
    layout_agrees(layout(CONFIG), plain)
    assert set(layout(CONFIG).target) == {path for path, _ in tree.leaves_with_path(trained())}


def test_the_placements_deal_out_what_the_layout_makes() -> None:
    leaves = layout(CONFIG).target
    assert set(placements(CONFIG)) == set(leaves)
    assert {1, 2} <= set(placements_agree(leaves, placements(CONFIG)))


def prompts(count: int = 4) -> FlowPrompts:
    labels = torch.arange(count) % 2
    return FlowPrompts(
        conditions=Conditions(positive=labels, negative=torch.full_like(labels, 2)), ids=torch.arange(count)
    )


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_training_recomputes_what_the_rollout_recorded(guidance: float) -> None:
    for dynamics in ("flow_sde", "dance_sde", "cps"):
        process = Process(dynamics=dynamics, guidance=guidance)  # type: ignore[arg-type]
        laws.trajectory_matches_training(
            POLICY, trained(), prompts(), Key.of(3), process, flow_match(4), noise_levels(4, None), samples=3
        )


def test_adapters_change_the_velocity_as_their_merged_weights_do() -> None:
    params, sites = trained(), chosen(layout(CONFIG))
    assert {site.name for site in sites} >= {"to_q", "to_k", "to_v"} and len(sites) >= 18
    made = adapters.init(adapters.shapes(sites, lambda module: 2, lambda module: 0.5), Key.of(1))
    moved = {name: tree.map(lambda x: x + 0.1, part) for name, part in made.items()}
    state, time, labels = numbers("state", 3, *POLICY.latent_shape), torch.tensor([900.0, 300.0, 20.0]), torch.arange(3)

    def ask(given: DiT) -> torch.Tensor:
        return POLICY.velocity(given, state, time, labels)

    adapted = adapters.adapt(params, moved, sites)
    assert torch.equal(ask(adapters.adapt(params, made, sites)), ask(params))
    assert torch.allclose(ask(adapted), ask(adapters.merge(adapted)), atol=1e-5)
    assert not torch.allclose(ask(adapted), ask(params), atol=1e-2)


def test_O12_parameters_of_an_update_are_seen_under_an_autocast_that_spans_it() -> None:
    """Old and new parameters are different tensors, so that no cache of casts can take one for the other."""
    old = trained()
    new = tree.map(lambda x: x * 1.5, old)
    asked = numbers("state", 2, *POLICY.latent_shape), torch.tensor([900.0, 20.0]), torch.tensor([0, 1])

    def apart(params: DiT) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return POLICY.velocity(params, *asked)

    with torch.autocast("cpu", torch.bfloat16):
        first, second, third = (POLICY.velocity(params, *asked) for params in (old, new, old))
    assert torch.equal(first, apart(old)) and torch.equal(second, apart(new)) and torch.equal(third, first)
    assert not torch.allclose(first, second, atol=1e-2)


def test_objectives_differentiate_it() -> None:
    given = prompts()
    (batch,) = noised(numbers("clean", 4, *POLICY.latent_shape), given.conditions, given.ids, Key.of(0), Times())
    laws.gradient(pipeline(predict(POLICY), velocity_matching()), trained(), batch)


def test_conditions_are_dropped_by_key_and_id() -> None:
    given, ids = prompts(4000).conditions, torch.arange(4000)
    found = dropped(given, Key.of(0), ids, 0.25).positive
    assert 0.22 < float((found == 2).float().mean()) < 0.28
    assert torch.equal(found[found != 2], given.positive[found != 2])
    some = torch.tensor([5, 17, 900])
    part = Conditions(positive=given.positive[some], negative=given.negative[some])
    assert torch.equal(dropped(part, Key.of(0), ids[some], 0.25).positive, found[some])
    with pytest.raises(SpecError, match="between 0 and 1, received 1.5"):
        dropped(given, Key.of(0), ids, 1.5)
    with pytest.raises(RecordError, match="needs Conditions.negative"):
        dropped(Conditions(positive=ids), Key.of(0), ids)


def begun(params: DiT, rate: float) -> tuple[Optimizer, TrainState]:
    optimizer = adamw(AdamWSpec(lr=rate), 300)
    roles = {"params": {"actor": params}, "optim": {"actor": optimizer.init(params)}, "snapshots": {}}
    return optimizer, TrainState(**roles, counters=Counters(), key=Key.of(0), cursor=Cursor())


def brightness(state: TrainState) -> torch.Tensor:
    """The mean of 8 dark and of 8 bright pictures, drawn without noise."""
    sample = flow_sampler(POLICY, Process(dynamics="ode"))
    drawn = sample(state.params["actor"], prompts(16), Key.of(9), flow_match(8), noise_levels(8, ()))
    return drawn.final.mean((1, 2, 3)).reshape(8, 2).mean(0)


def test_it_learns_classes_and_then_a_reward() -> None:
    """Dark and bright pictures by class, by flow matching; then brighter ones of both, by Flow-GRPO with the loss of tokens."""
    optimizer, state = begun(init(CONFIG, Key.of(0)), 3e-3)
    given = prompts(32)
    level = (given.conditions.positive * 2 - 1).float()[:, None, None, None]
    clean = level + 0.1 * numbers("pictures", 32, 1, 4, 4)
    learn = train_step(pipeline(predict(POLICY), velocity_matching()), optimizer)
    losses = []
    for step in range(120):
        key = state.key.fold(step)
        conditions = dropped(given.conditions, key, given.ids)
        state, metrics = learn(state, noised(clean, conditions, given.ids, key, Times()))
        losses.append(metrics["train/loss"])
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])
    dark, bright = brightness(state).tolist()
    assert dark < -0.7 and bright > 0.7

    optimizer, state = begun(state.params["actor"], 3e-4)
    sample = flow_sampler(POLICY, Process())
    improve = train_step(pipeline(act_flow(POLICY), clipped(1e-2, 1e-2)), optimizer)
    for step in range(12):
        key = state.key.fold("rollout").fold(step)
        drawn = sample(state.params["actor"], prompts(4), key, flow_match(6), noise_levels(6, None), samples=8)
        state, metrics = improve(state, denoising(drawn, group_advantages(drawn.final.mean((1, 2, 3)), drawn.groups)))
        assert metrics["train/ratio_max"] == 1.0
    darker, brighter = brightness(state).tolist()
    assert darker > dark + 0.1 and brighter > bright + 0.05
