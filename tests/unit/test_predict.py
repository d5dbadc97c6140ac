"""The memory of a training step that is told beforehand: what of it can be counted on a CPU is counted."""

from __future__ import annotations

import tomllib
from typing import Any

import attrs
import msgspec
import pytest
import torch
from e2e import tiny

from areno_fn import tree
from areno_fn.contracts.footprint import Footprint, largest
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import AdamW8bitSpec, AdamWSpec, MuonSpec, OptimizerSpec, RunSpec
from areno_fn.engine import session
from areno_fn.engine.foreseen import foreseen
from areno_fn.engine.plan import Plan, plan
from areno_fn.engine.predict import LIBRARIES, predict
from areno_fn.kernels.attention import fused, packed_layout
from areno_fn.models.decoder import DecoderConfig, init, shapes
from areno_fn.models.decoder_block import Pair, block
from areno_fn.models.decoder_layer import angles
from areno_fn.models.decoder_memory import Work, kept, moments
from areno_fn.steps.optimizers import optimizer

CONFIG = DecoderConfig(
    vocab_size=1024, hidden_size=48, intermediate_size=80, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16,
    qk_norm=True, tie_embeddings=True,
)  # fmt: skip
NUMBERS = 1024 * 48 + 48 + 4 * (128 * 48 + 48 * 64 + 160 * 48 + 48 * 80 + 2 * 48 + 2 * 16)


def work(remat: int, tokens: int = 256) -> Work:
    return Work(config=CONFIG, tokens=tokens, decisions=tokens, remat=remat, dtype=torch.bfloat16, head=1000)


@pytest.mark.parametrize("spec", [AdamWSpec(), AdamWSpec(states="stored"), AdamW8bitSpec(), MuonSpec()])
def test_what_an_optimizer_keeps_is_what_it_makes(spec: OptimizerSpec) -> None:
    parts = predict(CONFIG, spec, 256).parts
    state = optimizer(spec, 1).init(init(CONFIG, Key.of(0), torch.bfloat16))
    assert parts["masters"] + parts["moments"] == sum(leaf.nbytes for leaf in tree.leaves(state))
    assert parts["parameters"] == 2 * NUMBERS and parts["libraries"] == LIBRARIES


def test_by_hand() -> None:
    """AdamW in float32 has 12 bytes a parameter, stored in bfloat16 4; several micro-batches add 4."""
    full, stored = predict(CONFIG, AdamWSpec(), 256), predict(CONFIG, AdamWSpec(states="stored"), 256)
    assert (full.parts["masters"], stored.parts["masters"]) == (4 * NUMBERS, 0)
    assert full.total - stored.total == pytest.approx(8 * NUMBERS, abs=100)
    assert predict(CONFIG, AdamWSpec(), 256, micro_batches=3).total == full.total + 4 * NUMBERS


def test_the_head_by_hand() -> None:
    """16,384 rows of 151,936 logits in eight parts, and the gradient of the matrix in float32, 0.62 GB."""
    large = attrs.evolve(CONFIG, vocab_size=151936, hidden_size=1024)
    found = predict(large, AdamWSpec(), 16384, remat=1)
    assert found.moment == "at the head"
    total, rows, logits = 151936 * 1024 * 4, 16384 * 1024 * 2, 2048 * 151936 * 2
    sums = 3 * 594 * 2048 * 4  # three numbers of every row in every tile of 256 columns
    assert found.parts["head"] == total + rows + logits + sums + 2048 * 1024 * 10
    assert predict(CONFIG, AdamWSpec(), 256).parts.get("head", 0) < 256 * 1024 * 4 + 256 * 48 * 6 + 1024 * 48 * 2 + 1


@pytest.mark.parametrize("remat", [False, True])
def test_a_layer_keeps_what_it_is_said_to_keep(remat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that autograd saves of a layer, but for parameters and angles, which are there anyway."""
    count = 256

    def forward(q: Any, k: Any, v: Any, layout: Any, scale: float) -> tuple[torch.Tensor, ...]:
        return torch.zeros_like(q), torch.zeros(4, count), torch.zeros(0), torch.zeros(0)

    monkeypatch.setattr(fused, "forward", forward)
    params = tree.map(lambda x: x.requires_grad_(), init(CONFIG, Key.of(0), torch.bfloat16))
    cos, sin = (x.bfloat16() for x in angles(CONFIG, torch.arange(count)))
    pair = Pair(*(torch.ones(count, 48, dtype=torch.bfloat16).requires_grad_() for _ in range(2)))
    aside = {x.data_ptr() for x in (*tree.leaves(params), cos, sin)}
    seen: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in aside:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    layout = packed_layout(torch.zeros(count, dtype=torch.int64))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        block(CONFIG, params.layers[0], pair, cos, sin, layout, remat=remat)
    assert sum(seen.values()) == kept(work(int(remat), count), 0)


def test_moments_are_told_from_the_last_layer_to_the_embedding() -> None:
    told = [one.moment for one in moments(work(0))]
    layers = [f"in the backward pass of layer {layer}" for layer in (3, 2, 1, 0) for _ in range(5)]
    assert told == ["at the head", *layers, "in the backward pass of the embedding"]
    last = list(moments(work(2)))
    model = shapes(CONFIG, torch.bfloat16)
    assert last[-1].parts["gradients"] == 2 * NUMBERS + model.embed.nbytes  # that of the embedding is there twice
    assert last[-2].parts["kept"] == kept(work(2), 0) + 256 * 16 * 2


def test_less_is_kept_of_layers_that_are_computed_again() -> None:
    totals = [predict(CONFIG, AdamWSpec(), 65536, remat=remat).total for remat in (0, 4, 2, 1)]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4


def test_the_largest_moment() -> None:
    found = largest([Footprint(moment="a", parts={"x": 1}), Footprint(moment="b", parts={"x": 2, "y": 10**9})])
    assert found.moment == "b" and str(found.beside({"z": 0})) == "1.00 GB b: x 0.00, y 1.00"


def planned(dtype: torch.dtype) -> Plan:
    made = plan(msgspec.convert(tomllib.loads(tiny.SPEC), RunSpec))
    params = {role: tree.map(lambda x: x.to(dtype), own) for role, own in made.trained.params.items()}
    return attrs.evolve(made, trained=attrs.evolve(made.trained, params=params))


def test_a_dry_run_tells_it_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(torch.bfloat16)
    supervised, sampled = (foreseen(made, phase.spec) for phase in made.phases)
    assert supervised is not None and sampled is not None
    numbers = sum(leaf.numel() for leaf in tree.leaves(made.trained.params))
    assert sampled.parts["snapshots"] == 2 * numbers and supervised.parts["snapshots"] == 0
    monkeypatch.setattr(session, "plan", lambda spec: made)
    assert f"    a step takes, on a GPU, at most {supervised}" in session.describe(made.spec).splitlines()
    plain = planned(torch.float32)
    assert foreseen(plain, plain.phases[0].spec) is None
