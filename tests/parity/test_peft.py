"""Adapters against PEFT: what it writes is read here and what is written here is read by it, outputs and gradients alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import areno_fn as af
from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.ckpt.peft import key_of
from areno_fn.contracts.errors import ArenoError, CheckpointError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import (
    SFT,
    ArithmeticData,
    Batch,
    ByteTokenizer,
    FullFinetune,
    HFModel,
    Lora,
    Phase,
    RunSpec,
)
from areno_fn.engine.adapter_files import save_adapter
from areno_fn.engine.finetune import BASE, LoraPlan
from areno_fn.engine.plan import Plan
from areno_fn.steps.recipes import ACTOR

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
}
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "every linear map": {"r": 4, "lora_alpha": 8, "target_modules": EVERY},
    "q and v, as rslora": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "several ranks": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["k_proj", "up_proj", "down_proj"],
        "rank_pattern": {"up_proj": 2},
        "alpha_pattern": {"down_proj": 7},
    },
}
CASES = [("llama", name) for name in ADAPTERS] + [("qwen2", "every linear map"), ("qwen3", "every linear map")]
B_SIZE = 0.03
TOKENS = torch.randint(0, 259, (24,), generator=torch.Generator().manual_seed(5))


def base_model(family: str) -> Any:
    """A transformers model with random numbers in every parameter."""
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.05, generator=generator).add_(1.0 if "norm" in name else 0.0)
    return model


def peft_model(family: str, adapter: str, folder: Path) -> Any:
    """The model with a random adapter of PEFT, neither A nor B zero; both are saved in `folder`."""
    model = base_model(family)
    model.save_pretrained(folder / "base")
    made = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[adapter])).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, B_SIZE if "lora_B" in name else 0.15, generator=generator)
    made.save_pretrained(folder / "adapter")
    return made


def planned(folder: Path, finetune: Lora | FullFinetune) -> Plan:
    phase = Phase(
        name="sft", steps=1, algorithm=SFT(), data=[ArithmeticData(digits=1, count=4)], batch=Batch(max_length=32)
    )
    model = HFModel(path=str(folder / "base"))
    return af.plan(RunSpec(model=model, tokenizer=ByteTokenizer(), device="cpu", phases=[phase], finetune=finetune))


def logits(plan: Plan, params: dict[str, Any]) -> torch.Tensor:
    policy, positions = plan.model.policy, torch.arange(len(TOKENS))
    view = plan.finetune.view(params)
    return policy.logits(view, policy.hidden(view, TOKENS, positions, torch.zeros_like(positions)))


@pytest.mark.parametrize(("family", "adapter"), CASES)
def test_an_adapter_of_peft_gives_the_same_outputs_here(family: str, adapter: str, tmp_path: Path) -> None:
    theirs = peft_model(family, adapter, tmp_path)
    plan = planned(tmp_path, Lora(adapter=str(tmp_path / "adapter")))
    params = plan.finetune.load(Key.of(0), torch.device("cpu"))
    with torch.no_grad():
        expected = theirs(TOKENS[None]).logits[0]
        received = logits(plan, params)
        with theirs.disable_adapter():
            unadapted = theirs(TOKENS[None]).logits[0]
    assert float((received - expected).abs().max()) < 1e-6
    assert float((unadapted - expected).abs().max()) > 1e-2  # so the adapter is what was compared
    stored = sum(1 for name, _ in theirs.named_parameters() if "lora_" in name)
    assert len(tree.leaves(params[ACTOR])) == stored


@pytest.mark.parametrize(("family", "adapter"), CASES)
def test_an_adapter_of_ours_gives_the_same_outputs_in_peft(family: str, adapter: str, tmp_path: Path) -> None:
    model = base_model(family)
    model.save_pretrained(tmp_path / "base")
    wanted = ADAPTERS[adapter]
    targets = [] if wanted["target_modules"] == EVERY else wanted["target_modules"]
    spec = Lora(rank=wanted["r"], alpha=9.0, targets=targets, rslora=bool(wanted.get("use_rslora")))
    plan = planned(tmp_path, spec)
    assert isinstance(plan.finetune, LoraPlan)
    params = plan.finetune.load(Key.of(0), torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    params[ACTOR] = {
        module: replace(part, b=torch.randn(part.b.shape, generator=generator) * B_SIZE)
        for module, part in params[ACTOR].items()
    }
    save_adapter(tmp_path / "ours", plan.finetune.configs[""], params[ACTOR])
    theirs = PeftModel.from_pretrained(model, tmp_path / "ours").eval()
    with torch.no_grad():
        difference = logits(plan, params) - theirs(TOKENS[None]).logits[0]
    assert float(difference.abs().max()) < 1e-6
    assert sum(1 for name, _ in theirs.named_parameters() if "lora_" in name) == len(tree.leaves(params[ACTOR]))


@pytest.mark.parametrize(("family", "adapter"), CASES)
def test_gradients_of_a_and_b_are_those_of_peft(family: str, adapter: str, tmp_path: Path) -> None:
    theirs = peft_model(family, adapter, tmp_path)
    plan = planned(tmp_path, Lora(adapter=str(tmp_path / "adapter")))
    params = plan.finetune.load(Key.of(0), torch.device("cpu"))

    def loss(out: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(out[:-1], TOKENS[1:])

    def of_adapters(own: Any) -> torch.Tensor:
        return loss(logits(plan, {**params, ACTOR: own}))

    value, slope = value_and_grad(of_adapters)(params[ACTOR])
    expected = loss(theirs(TOKENS[None]).logits[0])
    expected.backward()
    torch.testing.assert_close(value, expected.detach(), atol=1e-6, rtol=0)
    found = dict(tree.leaves_with_path(slope))
    compared = 0
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            module = name.removeprefix("base_model.model.").split(".lora_")[0]
            ours = found[f"{module}.{'a' if 'lora_A' in name else 'b'}"]
            torch.testing.assert_close(
                ours, parameter.grad, atol=1e-6, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )
            assert float(ours.abs().max()) > 1e-4
            compared += 1
    assert compared == len(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_is_the_one_that_peft_merges(family: str, tmp_path: Path) -> None:
    theirs = peft_model(family, "every linear map", tmp_path)
    plan = planned(tmp_path, Lora(adapter=str(tmp_path / "adapter")))
    params = plan.finetune.load(Key.of(0), torch.device("cpu"))
    merged = plan.finetune.merged(params, lambda path: torch.float32)
    written = plan.model.layout.inverse(dict(tree.leaves_with_path(merged)))
    expected = theirs.merge_and_unload().state_dict()
    for name, tensor in written.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
    before = plan.model.layout.inverse(dict(tree.leaves_with_path(params[BASE])))
    changed = [name for name in written if not torch.equal(written[name], before[name])]
    assert len(changed) == 7 * 2


def test_a_new_adapter_begins_as_in_peft(tmp_path: Path) -> None:
    model = base_model("qwen3")
    model.save_pretrained(tmp_path / "base")
    plan = planned(tmp_path, Lora(rank=8))
    ours = plan.finetune.load(Key.of(0), torch.device("cpu"))[ACTOR]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = get_peft_model(model, LoraConfig(r=8, target_modules=EVERY, task_type="CAUSAL_LM"))
    stored = {name.replace(".default", ""): x.detach() for name, x in theirs.named_parameters() if "lora_" in name}
    assert sorted(stored) == sorted(key_of(module, side) for module in ours for side in "AB")
    for module, part in ours.items():
        drawn = stored[key_of(module, "A")]
        bound = drawn.shape[1] ** -0.5
        assert part.a.shape == drawn.shape and not part.b.any() and not stored[key_of(module, "B")].any()
        for a in (part.a, drawn):  # a uniform distribution: its bound, and its deviation, which is bound / sqrt(3)
            assert 0.9 * bound < float(a.abs().max()) <= bound
            assert abs(float(a.std()) * 3**0.5 / bound - 1) < 0.15
    again = plan.finetune.load(Key.of(0), torch.device("cpu"))[ACTOR]
    other = plan.finetune.load(Key.of(1), torch.device("cpu"))[ACTOR]
    assert tree.equal(ours, again) and not tree.equal(ours, other)
    flat = [part.a.flatten()[:64].tolist() for part in ours.values()]
    assert len({tuple(row) for row in flat}) == len(flat)  # no two modules draw the same numbers


def refused(folder: Path, change: Callable[[dict[str, Any]], None]) -> str:
    path = folder / "adapter" / "adapter_config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ArenoError) as caught:
        planned(folder, Lora(adapter=str(folder / "adapter")))
    return str(caught.value)


def test_adapters_that_are_not_trained_here_are_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    peft_model("llama", "q and v, as rslora", tmp_path)
    said = refused(tmp_path, lambda values: values.update(lora_dropout=0.1))
    assert said.startswith(
        f"finetune.adapter: {tmp_path / 'adapter'}: lora_dropout is 0.1, but adapters are trained without"
    )
    said = refused(tmp_path, lambda values: values.update(lora_dropout=0.0, fan_in_fan_out=True))
    assert "fan_in_fan_out is true" in said


def test_an_adapter_of_another_model_is_refused_with_all_that_does_not_fit(tmp_path: Path) -> None:
    peft_model("llama", "every linear map", tmp_path)
    config = AutoConfig.for_model("llama", **{**SIZES, "intermediate_size": 48}, **FAMILIES["llama"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError) as caught:
        planned(tmp_path, Lora(adapter=str(tmp_path / "adapter")))
    said = str(caught.value)
    assert "is an adapter of another model" in said
    assert said.count("'base_model.model.") == 2 * 3  # A of down, B of gate and up, in both layers
