"""Muon against torch's, against hand-worked numbers, and on the fused leaves of real families."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from areno_fn import tree
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.placement import grouped, pairs
from areno_fn.contracts.spec import Group, MuonSpec, Remainder, Schedule
from areno_fn.models.layouts import LAYOUTS
from areno_fn.steps.optimizers import labels_of, muon, orthogonal, scale_by_muon
from areno_fn.testing import laws

EXACT = (15 / 8, -10 / 8, 3 / 8)
"""Coefficients with which singular values converge to 1."""
F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


MATRICES = {"layers": [{"tall": draw(7, 3), "wide": draw(3, 8, seed=1)}, {"square": draw(4, 4, seed=2)}]}


def torchs(spec: MuonSpec) -> Any:
    def make(named: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(
            list(named.values()),
            lr=spec.lr,
            weight_decay=spec.weight_decay,
            momentum=spec.momentum,
            nesterov=spec.nesterov,
            ns_steps=spec.iterations,
            adjust_lr_fn=None if spec.adjust == "none" else spec.adjust,
        )

    return make


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_torch_over_100_steps(adjust: Any, nesterov: bool) -> None:
    """Float64 with gradients that depend on the parameters. In float32 they do not: both sides orthogonalise in bfloat16, where
    a rounding of float32 now and then tips a bfloat16 number over, by 2^-8."""
    spec = MuonSpec(lr=0.02, weight_decay=0.1, adjust=adjust, nesterov=nesterov, max_grad_norm=0.0)
    laws.optimizer_matches(muon(spec, 100), torchs(spec), MATRICES, tolerances={F64: 1e-12})
    laws.optimizer_matches(muon(spec, 100), torchs(spec), MATRICES, feedback=0.0, tolerances={torch.float32: 1e-5})


def test_muon_equals_torch_with_other_settings() -> None:
    spec = MuonSpec(lr=0.05, weight_decay=0.0, momentum=0.8, iterations=3, max_grad_norm=0.0)
    laws.optimizer_matches(muon(spec, 100), torchs(spec), MATRICES, tolerances={F64: 1e-12})


def test_the_composite_equals_torchs_muon_and_adamw_under_one_clip_and_schedule() -> None:
    spec = MuonSpec(
        lr=0.02,
        weight_decay=0.1,
        max_grad_norm=0.7,
        schedule=Schedule(kind="linear", warmup_steps=10),
        adamw=Remainder(lr=3e-3, betas=(0.8, 0.99), weight_decay=0.2),
    )
    params = {
        "embed": draw(6, 4),
        "layers": [{"w": draw(5, 4, seed=3), "norm": draw(4, seed=4)}],
        "head": draw(6, 4, seed=5),
    }

    class Both(torch.optim.Optimizer):
        def __init__(self, named: dict[str, torch.nn.Parameter]) -> None:
            self.parts = [
                torch.optim.Muon([named["layers.0.w"]], lr=0.02, weight_decay=0.1),
                torch.optim.AdamW(
                    [
                        {"params": [named["embed"], named["head"]], "weight_decay": 0.2},
                        {"params": [named["layers.0.norm"]], "weight_decay": 0.0},
                    ],
                    betas=(0.8, 0.99),
                    lr=3e-3,
                ),
            ]

        def step(self, closure: Any = None) -> None:
            for part in self.parts:
                part.step()

    def before(leaves: list[torch.nn.Parameter], both: Any, step: int) -> None:
        torch.nn.utils.clip_grad_norm_(leaves, 0.7)
        share = step / 10 if step < 10 else (100 - step) / 90
        for part, base in zip(both.parts, (0.02, 3e-3), strict=True):
            for group in part.param_groups:
                group["lr"] = base * share

    laws.optimizer_matches(muon(spec, 100), Both, params, tolerances={F64: 1e-11}, before_step=before)


def test_newton_schulz_by_hand() -> None:
    """A number is brought to 1, and one iteration makes a + b + c of it: 3.4445 - 4.7750 + 2.0315."""
    assert orthogonal(torch.tensor([[-7.0]], dtype=F64), iterations=1, dtype=F64).item() == pytest.approx(
        -0.701, abs=1e-12
    )
    # diag(3, 4) / 5 has 0.6 and 0.8; one iteration of the exact polynomial: (15 x - 10 x^3 + 3 x^5) / 8
    found = orthogonal(torch.diag(torch.tensor([3.0, 4.0], dtype=F64)), 1, EXACT, dtype=F64)
    assert found.diagonal().tolist() == pytest.approx([0.88416, 0.98288], abs=1e-12)
    assert orthogonal(torch.zeros(2, 3)).count_nonzero().item() == 0


def test_one_step_by_hand() -> None:
    """Momentum 0.5: m = 0.5 g, looked ahead along 0.75 g, which has the factor of g. p = 1 - 0.1 (0.701 + 0.2 p)."""
    transform = scale_by_muon(momentum=0.5, iterations=1, dtype=F64)
    params = {"w": torch.ones(1, 1, dtype=F64)}
    moves, state = transform.update({"w": torch.full((1, 1), 3.0, dtype=F64)}, transform.init(params), params)
    assert moves["w"].item() == pytest.approx(0.701, abs=1e-12) and state.momentum["w"].item() == 1.5
    for adjust, shape, factor in (
        ("original", (8, 2), 2.0),
        ("original", (2, 8), 1.0),
        ("match_rms_adamw", (4, 9), 0.6),
        ("none", (8, 2), 1.0),
    ):
        params = {"w": draw(*shape)}
        found, _ = scale_by_muon(adjust=adjust, dtype=F64).update(params, scale_by_muon().init(params), params)  # type: ignore[arg-type]
        torch.testing.assert_close(found["w"], factor * orthogonal(params["w"], dtype=F64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_the_exact_polynomial_gives_the_polar_factor(shape: tuple[int, int]) -> None:
    matrix = draw(*shape, seed=7)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(orthogonal(matrix, 40, EXACT, dtype=F64), u @ vh, rtol=1e-9, atol=1e-9)


def test_O4_the_momentum_is_orthogonalised_and_not_the_gradient() -> None:
    transform = scale_by_muon(momentum=0.9, nesterov=False, dtype=F64)
    first, second = {"w": draw(4, 4, seed=1)}, {"w": draw(4, 4, seed=2)}
    _, state = transform.update(first, transform.init(first), first)
    moves, _ = transform.update(second, state, first)
    torch.testing.assert_close(
        moves["w"], orthogonal(0.09 * first["w"] + 0.1 * second["w"], dtype=F64), rtol=1e-9, atol=1e-9
    )
    assert float((moves["w"] - orthogonal(second["w"], dtype=F64)).abs().max()) > 0.1


def test_O5_fused_blocks_are_orthogonalised_apart() -> None:
    """q = k = I2: each block keeps singular values of 1; as one matrix the two share them, 0.7071 each."""
    stacked = {"gate_up": torch.cat([torch.eye(2, dtype=F64)] * 2)}

    def moved(placements: Any) -> torch.Tensor:
        transform = scale_by_muon(adjust="none", iterations=40, coefficients=EXACT, dtype=F64, placements=placements)
        return transform.update(stacked, transform.init(stacked), stacked)[0]["gate_up"]

    apart = moved({"gate_up": pairs(2)})
    for block in apart.split(2):
        assert torch.linalg.svdvals(block).tolist() == pytest.approx([1, 1], abs=1e-9)
    for block in moved({}).split(2):
        assert torch.linalg.svdvals(block).tolist() == pytest.approx([math.sqrt(0.5)] * 2, abs=1e-9)


def test_O5_a_fused_leaf_equals_torchs_muon_on_its_parts_over_100_steps() -> None:
    """Grouped queries: 8 rows of q, 4 of k and of v, so that "original" scales q differently from k."""
    spec = MuonSpec(lr=0.02, weight_decay=0.1, max_grad_norm=0.0)
    whole = {"qkv": draw(16, 5)}
    parts = [torch.nn.Parameter(part.clone()) for part in whole["qkv"].split([8, 4, 4])]
    theirs = torch.optim.Muon(parts, lr=0.02, weight_decay=0.1)
    ours = muon(spec, 100, {"qkv": grouped(4, 2, 2)})
    state = ours.init(whole)
    for step in range(100):
        whole, state, _ = ours.apply(tree.map(lambda p, s=step: 2 * p + math.sin(s), whole), state, whole)
        for part in parts:
            part.grad = 2 * part.detach() + math.sin(step)
        theirs.step()
    torch.testing.assert_close(whole["qkv"], torch.cat([part.detach() for part in parts]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_moe_text", "gemma4_text", "bailing_moe_linear"]
)
def test_O5_O6_every_leaf_of_a_family_has_blocks_that_fit(kind: str) -> None:
    """The blocks of a leaf are those its table names, and embeddings, heads, convolutions and vectors are never hidden."""
    family = LAYOUTS[kind]
    for variant in family.variants.values():
        config = family.config_from_hf({"model_type": kind, **variant})
        specs, placements = family.layout(config).target, family.placements(config)
        label = labels_of(MuonSpec(), placements)
        for path, spec in specs.items():
            leaf = torch.empty(spec.shape, device="meta")
            chosen = label(path, leaf)
            assert (chosen == "muon") == (
                len(spec.shape) >= 2 and not {"embed", "head", "layer_embed", "conv"} & set(path.split("."))
            ), path
            if chosen == "muon":
                transform = scale_by_muon(placements=placements, iterations=1)
                moves, _ = transform.update({path: leaf}, transform.init({path: leaf}), {path: leaf})
                assert moves[path].shape == leaf.shape


def test_O6_a_vector_in_muon_is_refused() -> None:
    with pytest.raises(RecordError, match=r"Muon was given norm, which is f32\[3\], but it moves matrices alone"):
        scale_by_muon().init({"norm": torch.ones(3)})


def test_O7_the_momentum_of_a_specification_arrives() -> None:
    params = {"w": draw(3, 3)}
    optimizer = muon(MuonSpec(momentum=0.9, max_grad_norm=0.0), 10)
    _, state, stats = optimizer.apply({"w": torch.ones(3, 3, dtype=F64)}, optimizer.init(params), params)
    assert state.inner[1].inner["muon"][0].momentum["w"].tolist() == [[pytest.approx(0.1)] * 3] * 3
    assert stats["lr"].item() == 0.02 and stats["grad_norm"].item() == 3.0


def test_a_stack_of_matrices_is_orthogonalised_one_by_one() -> None:
    stack = draw(3, 4, 5)
    found = orthogonal(stack)
    assert all(torch.equal(found[i], orthogonal(stack[i])) for i in range(3))


def test_a_step_is_pure_and_bfloat16_weights_move_by_their_masters() -> None:
    optimizer = muon(MuonSpec(lr=1e-4, groups=[Group(name="slow", paths=["b"], lr=1e-6, weight_decay=0.0)]), 10)
    params = {
        "a": draw(4, 4).bfloat16(),
        "b": draw(4, 4, seed=1).bfloat16(),
        "norm": torch.ones(4, dtype=torch.bfloat16),
    }
    state = optimizer.init(params)
    moved, after, _ = laws.pure(optimizer.apply, tree.map(torch.ones_like, params), state, params)
    for path, rate in (("a", 1e-4), ("b", 1e-6)):
        distance = (after.master[path] - state.master[path]).abs().max().item()
        assert 0.1 * rate < distance < 1.5 * rate
        assert moved[path].dtype == torch.bfloat16
