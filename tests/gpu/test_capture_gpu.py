"""Runs whose updates are captured, on a CUDA device: the bits of the same updates that are not, also after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import tiny
from e2e.test_kill import Killed, die_after
from e2e.test_ppo import SHORT
from e2e.test_ppo import SPEC as PPO

import areno_fn as af
from areno_fn import tree
from areno_fn.contracts.errors import KernelError
from areno_fn.contracts.optim import Optimizer
from areno_fn.contracts.spec import AdamWSpec, Group, MuonSpec, OptimizerSpec, SGDSpec
from areno_fn.steps import capture
from areno_fn.steps.capture import Captured, Graphs
from areno_fn.steps.optimizers import optimizer
from areno_fn.steps.token.sizes import alike

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SMALL = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
FAMILY = af.FAMILIES["qwen3"]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A mark for every update that is captured."""
    found: list[Any] = []
    made = Captured._captured

    def noted(self: Captured, kind: Any, *trees: Any) -> Any:
        found.append(kind)
        return made(self, kind, *trees)

    monkeypatch.setattr(Captured, "_captured", noted)
    return found


def half(folder: Path) -> Path:
    """The tiny run on a model of bfloat16, which the run in float32 has left."""
    start = tiny.write_spec(folder / "start")
    assert tiny.run(start, folder / "first", device=DEVICE, phases__sft__steps=1, phases__grpo__steps=1).code == 0
    head, rest = tiny.SPEC.split("[model]")
    rest = rest[rest.index("[[phases]]") :]
    model = f'[model]\nkind = "hf"\npath = "{folder / "first/export"}"\ndtype = "bfloat16"\n'
    return tiny.write_spec(folder / "half", head + model + rest)


def options(spec: Path, captured: bool = True) -> dict[str, Any]:
    named = ("sft", "ppo" if spec == PPO else "grpo")
    return {"device": DEVICE, "log__tensorboard": False} | {f"phases__{name}__capture": captured for name in named}


def spec_of(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    if name == "ppo":
        return PPO, SHORT | {"phases__sft__steps": 5, "phases__ppo__steps": 6}
    longer = {"phases__sft__steps": 8, "phases__grpo__steps": 6}
    if name == "all":
        longer |= {
            "phases__grpo__ema": {"decay": 0.9},
            "phases__grpo__offload": ["reference", "ema"],
            "phases__grpo__remat": 1,
            "phases__grpo__batch__micro_tokens": 64,
            "phases__grpo__algorithm__sampling__top_k": 20,
            "finetune": "lora",
        }
    return half(folder) if name != "float32" else tiny.write_spec(folder), longer


@pytest.mark.parametrize("name", ["float32", "bfloat16", "all", "ppo"])
def test_a_run_is_the_one_without_graphs_bit_for_bit(
    name: str, tmp_path: Path, captures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, values = spec_of(name, tmp_path / "spec")
    values |= options(spec)
    assert (done := tiny.run(spec, tmp_path / "replayed", **values)).code == 0, done.err
    assert len(captures) >= 2
    monkeypatch.setattr(capture, "captures", lambda held, read: False)
    assert tiny.run(spec, tmp_path / "plain", **values).code == 0
    assert tiny.difference(tmp_path / "plain", tmp_path / "replayed") is None


def test_padding_changes_roundings_alone(tmp_path: Path) -> None:
    spec = tiny.write_spec(tmp_path)
    found = []
    for captured in (False, True):
        assert tiny.run(spec, tmp_path / str(captured), **options(spec, captured)).code == 0
        lines = [line for line in tiny.untimed(tmp_path / str(captured) / "metrics.jsonl") if line["phase"] == "sft"]
        found.append([{name: value for name, value in line.items() if name.startswith("train/")} for line in lines])
    for plain, padded in zip(*found, strict=True):
        assert padded == pytest.approx(plain, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["bfloat16", "ppo"])
def test_a_killed_run_goes_on_bit_for_bit(
    name: str, tmp_path: Path, captures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is replayed in the whole run runs as it is in the one that goes on, and the other way round."""
    spec, values = spec_of(name, tmp_path / "spec")
    values |= options(spec) | {"checkpoint__every": 1, "checkpoint__keep": 1}
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert tiny.run(spec, whole, **values).code == 0
    assert len(captures) >= 2
    for saves in (4, 6):
        with monkeypatch.context() as dying:
            die_after(dying, "save", saves)
            with pytest.raises(Killed):
                tiny.run(spec, out, "--resume", **values)
    assert tiny.run(spec, out, "--resume", **values).code == 0
    assert tiny.difference(whole, out) is None


# ------------------------------------------------------------------------------------------ updates


def stepping(moved: Optimizer, sampling: af.Sampling, graphs: Graphs | None) -> tuple[Any, af.TrainState]:
    config = FAMILY.config_from_hf(SMALL)
    params = FAMILY.init(config, af.Key.of(0), dtype=torch.bfloat16, device=DEVICE)
    objective = af.pipeline(af.act(FAMILY.policy(config), sampling), af.clipped(kl_coef=0.1))
    state = af.TrainState(
        params={"actor": params},
        optim={"actor": moved.init(params)},
        snapshots={},
        counters=af.Counters(),
        key=af.Key.of(0),
        cursor=af.Cursor(),
    )
    return af.train_step(objective, moved, donate=True, capture=graphs or False), state


def experience(number: int, sampling: af.Sampling, longest: int = 64) -> tuple[af.Experience, ...]:
    """Ragged documents, which attention adds up in one order."""
    source = torch.Generator().manual_seed(number)
    lengths = torch.randint(longest // 2, longest, (16,), generator=source).tolist()
    texts = [torch.randint(0, 151936, (n,), generator=source).tolist() for n in lengths]
    rows = [af.Example(tokens=tuple(text), trained=(False, *[True] * (len(text) - 1))) for text in texts]
    packed = af.pack(rows)
    count = packed.targets.shape[0]
    if sampling.top_k:
        packed = af.replace(packed, kept=torch.full((count,), sampling.top_k))
    noise = torch.randn(3, count, generator=source)
    made = af.Experience(packed=packed, old=-11 + noise[0], advantage=noise[1], reference=-11 + noise[2])
    on_device: tuple[af.Experience, ...] = tree.map(lambda x: x.to(DEVICE), alike([made]))
    return on_device


MOVERS: dict[str, OptimizerSpec] = {
    "adamw": AdamWSpec(lr=1e-3),
    "stored": AdamWSpec(lr=1e-3, states="stored"),
    "groups": AdamWSpec(lr=1e-3, groups=[Group(name="norms", paths=["*norm"], lr=1e-2, weight_decay=0.0)]),
    "sgd": SGDSpec(lr=1e-2, momentum=0.9),
    "muon": MuonSpec(lr=1e-3),
}


@pytest.mark.parametrize("name", MOVERS)
@pytest.mark.parametrize("top_k", [0, 50])
def test_every_optimizer_is_captured(name: str, top_k: int) -> None:
    """Through the head that makes its gradients at once, of whole and of truncated distributions."""
    moved, sampling, graphs = optimizer(MOVERS[name], 100), af.Sampling(temperature=0.9, top_k=top_k), Graphs()
    plain, want = stepping(moved, sampling, None)
    replayed, got = stepping(moved, sampling, graphs)
    for number in range(6):
        want, told = plain(want, experience(number, sampling))
        got, also = replayed(got, experience(number, sampling))
        assert told == also, number
        assert tree.first_difference(want, got) is None, number
    assert graphs.count >= 1


def test_updates_of_long_documents_are_those_that_are_not_captured() -> None:
    moved, sampling, graphs = optimizer(MOVERS["adamw"], 100), af.Sampling(), Graphs()
    plain, want = stepping(moved, sampling, None)
    replayed, got = stepping(moved, sampling, graphs)
    for number in range(5):
        want, told = plain(want, experience(number, sampling, 1500))
        got, also = replayed(got, experience(number, sampling, 1500))
        assert told == also, number
        assert tree.first_difference(want, got) is None, number
    assert graphs.count >= 1


def test_graphs_that_are_forgotten_give_their_memory_back() -> None:
    moved, sampling, graphs = optimizer(MOVERS["adamw"], 100), af.Sampling(), Graphs()
    step, state = stepping(moved, sampling, graphs)
    for _ in range(3):
        state, _ = step(state, experience(0, sampling))
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    graphs.clear()
    torch.cuda.empty_cache()
    assert graphs.count == 0 and torch.cuda.memory_allocated() < held
    state, metrics = step(state, experience(0, sampling))
    assert metrics["train/loss"] == metrics["train/loss"]


def test_a_loss_that_waits_for_the_device_is_named() -> None:
    def waiting(actions: af.Actions) -> af.Sums:
        if float(actions.weight.sum()) < 0:  # a number on the host
            raise ValueError
        sums: af.Sums = af.clipped()(actions)
        return sums

    config = FAMILY.config_from_hf(SMALL)
    moved, sampling = optimizer(MOVERS["adamw"], 100), af.Sampling()
    _, state = stepping(moved, sampling, None)
    objective = af.pipeline(af.act(FAMILY.policy(config), sampling), waiting)
    step = af.train_step(objective, moved, donate=True, capture=True)
    state, _ = step(state, experience(0, sampling))
    with pytest.raises(KernelError, match="an update cannot be captured as a graph, because something in it waits"):
        step(state, experience(0, sampling))
