"""Adapters on a CUDA device: the numbers of the CPU, half precision, and a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import tiny
from e2e.test_lora import role, stored

import areno_fn as af
from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.models import FAMILIES
from areno_fn.models.adapter_sites import chosen
from areno_fn.models.adapters import adapt, init, merge, shapes

pytestmark = pytest.mark.gpu

FAMILY = FAMILIES["qwen3"]
CONFIG = FAMILY.config_from_hf(
    {
        "model_type": "qwen3", "vocab_size": 259, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
        "tie_word_embeddings": True, "initializer_range": 0.1,
    }
)  # fmt: skip
POLICY, SITES = FAMILY.policy(CONFIG), chosen(FAMILY.layout(CONFIG, head_in_file=False))
TOKENS = torch.arange(50) + 7


def parameters(device: str) -> tuple[Any, Any]:
    """The base, and adapters whose B is not zero."""
    own = {
        module: replace(part, b=torch.full_like(part.b, 0.1))
        for module, part in init(shapes(SITES, lambda _: 4, lambda _: 0.5), Key.of(1)).items()
    }
    base = FAMILY.init(CONFIG, Key.of(0))
    return tree.map(lambda x: x.to(device), base), tree.map(lambda x: x.to(device), own)


def logits(params: Any) -> torch.Tensor:
    device = params.embed.device
    places = torch.arange(len(TOKENS), device=device)
    hidden = POLICY.hidden(params, TOKENS.to(device), places, torch.zeros_like(places), bounds=(1, len(TOKENS)))
    return POLICY.logits(params, hidden).float()


def loss(adapters: Any, base: Any) -> torch.Tensor:
    return logits(adapt(base, adapters, SITES)).log_softmax(-1)[:, 7].mean()


def test_an_adapted_model_and_its_gradients_are_those_of_the_cpu() -> None:
    base, adapters = parameters("cpu")
    value, gradient = value_and_grad(loss)(adapters, base)
    moved, own = parameters("cuda")
    gpu_value, gpu_gradient = value_and_grad(loss)(own, moved)
    torch.testing.assert_close(gpu_value.cpu(), value, atol=1e-5, rtol=1e-5)
    for (path, a), b in zip(tree.leaves_with_path(gpu_gradient), tree.leaves(gradient), strict=True):
        assert (a.cpu() - b).abs().max() < 1e-3 * b.abs().max(), path
    again = value_and_grad(loss)(own, moved)
    assert tree.equal(again, (gpu_value, gpu_gradient)), tree.first_difference(again, (gpu_value, gpu_gradient))


def test_new_adapters_have_the_same_numbers_on_every_device() -> None:
    like = shapes(SITES, lambda _: 4, lambda _: 0.5)
    assert tree.equal(init(like, Key.of(1), "cuda"), init(like, Key.of(1)))


def test_a_half_precision_model_is_near_its_merged_one() -> None:
    base, adapters = parameters("cuda")
    half = tree.map(lambda x: x.bfloat16(), base)
    exact = logits(merge(adapt(tree.map(lambda x: x.float(), half), adapters, SITES)))
    assert float((logits(adapt(half, adapters, SITES)) - exact).norm() / exact.norm()) < 0.03
    assert float((logits(base) - exact).norm() / exact.norm()) > 0.1  # so the adapters are what is compared


def test_a_run_on_the_gpu_trains_the_adapters_and_leaves_the_base(tmp_path: Path) -> None:
    done = tiny.run(tiny.ROOT / "specs/lora.toml", tmp_path / "out", device="cuda")
    assert done.code == 0, done.err
    plan = af.plan(af.read_spec(str(tiny.ROOT / "specs/lora.toml")))
    start = plan.finetune.load(Key.of(plan.spec.seed), torch.device("cuda"))
    tensors = stored(tiny.last_checkpoint(tmp_path / "out"))
    frozen, own = role(tensors, "params.base"), role(tensors, "params.actor")
    assert all(torch.equal(frozen[path], leaf.cpu()) for path, leaf in tree.leaves_with_path(start["base"]))
    assert not any(torch.equal(own[path], leaf.cpu()) for path, leaf in tree.leaves_with_path(start["actor"]))
    losses = [line["train/loss"] for line in tiny.lines(tmp_path / "out/metrics.jsonl") if "train/loss" in line]
    assert losses[59] < losses[0] / 5
