"""Adapter files against PEFT: it loads what is written here, what it saves is read here, and merging gives the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areno_fn.ckpt import hf
from areno_fn.ckpt.peft import AdapterConfig, key_of, open_adapter, read_adapter, write_adapter
from areno_fn.ckpt.tools.convert import convert

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TOKENS = torch.arange(24).reshape(2, 12)
LORAS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "down_proj"]},
    "all-linear": {"target_modules": "all-linear", "lora_alpha": 3},
    "rslora": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "use_rslora": True},
    "patterns": {
        "target_modules": ["q_proj", "up_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "up_proj": 6},
        "alpha_pattern": {r"^model\.layers\.0.self_attn\.q_proj": 32, "mlp.up_proj|down_proj": 5},
    },
}


def fill(model: Any, seed: int) -> Any:
    """The model with random numbers in every parameter, so that no matrix of an adapter is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.3, generator=generator).add_(1.0 if "norm" in name else 0.0)
    return model.eval()


def base(family: str, dtype: torch.dtype = torch.float32) -> Any:
    hf = AutoConfig.for_model(family, **SIZES)
    return fill(AutoModelForCausalLM.from_config(hf, attn_implementation="eager"), 1).to(dtype)


def adapted(family: str, lora: str, dtype: torch.dtype = torch.float32) -> Any:
    made = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **LORAS[lora]})
    model = peft.get_peft_model(base(family, dtype), made)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3, generator=generator)
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_peft_saves_is_read_and_written_so_that_peft_computes_the_same(
    family: str, lora: str, tmp_path: Path
) -> None:
    model = adapted(family, lora)
    model.save_pretrained(tmp_path / "theirs")
    adapter = read_adapter(tmp_path / "theirs")
    write_adapter(tmp_path / "ours", adapter.config, adapter.tensors)
    assert read_adapter(tmp_path / "ours").config == adapter.config
    loaded = peft.PeftModel.from_pretrained(base(family), tmp_path / "ours").eval()
    assert torch.equal(logits(loaded), logits(model))
    assert (logits(loaded) - logits(base(family))).abs().max() > 0.1


@pytest.mark.parametrize("lora", LORAS)
def test_ranks_and_scales_of_every_module_are_those_of_peft(lora: str, tmp_path: Path) -> None:
    model = adapted("llama", lora)
    model.save_pretrained(tmp_path)
    opened = open_adapter(tmp_path)
    theirs = {
        name.removeprefix("base_model.model."): (layer.r["default"], layer.scaling["default"])
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }
    assert {m: (opened.config.rank(m), opened.config.scale(m)) for m in opened.modules} == theirs
    assert len(set(theirs.values())) == (3 if lora == "patterns" else 1)


def test_an_adapter_made_here_is_loaded_by_peft_and_adds_scale_b_a(tmp_path: Path) -> None:
    module = "model.layers.1.mlp.gate_proj"
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(3, 32, generator=generator), torch.randn(40, 3, generator=generator)
    config = AdapterConfig(r=3, lora_alpha=6, target_modules=("gate_proj",), task_type="CAUSAL_LM")
    model = base("llama")
    # the other layer's gate is adapted by nothing: zeros
    other = "model.layers.0.mlp.gate_proj"
    tensors = {key_of(module, "A"): a, key_of(module, "B"): b}
    tensors |= {key_of(other, "A"): torch.zeros(3, 32), key_of(other, "B"): torch.zeros(40, 3)}
    write_adapter(tmp_path / "a", config, tensors)
    loaded = peft.PeftModel.from_pretrained(base("llama"), tmp_path / "a").eval()
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight += 2.0 * (b.double() @ a.double()).float()
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-6, rtol=1e-5)


def test_every_field_that_is_written_is_one_that_peft_keeps(tmp_path: Path) -> None:
    config = AdapterConfig(
        r=2,
        lora_alpha=5,
        target_modules=("q_proj",),
        use_rslora=True,
        rank_pattern={"layers.1.self_attn.q_proj": 3},
        alpha_pattern={"layers.0.self_attn.q_proj": 7},
        lora_dropout=0.25,
        base_model_name_or_path="somewhere",
        revision="main",
        task_type="CAUSAL_LM",
    )
    modules = {f"model.layers.{i}.self_attn.q_proj": i for i in range(2)}
    tensors = {}
    for module, i in modules.items():
        tensors[key_of(module, "A")] = torch.ones(config.rank(module), 32) * i
        tensors[key_of(module, "B")] = torch.ones(32, config.rank(module))
    write_adapter(tmp_path / "a", config, tensors)
    theirs = peft.LoraConfig.from_pretrained(tmp_path / "a")
    for field in attrs.fields(AdapterConfig):
        kept = getattr(theirs, field.name)
        assert (tuple(kept) if isinstance(kept, set) else kept) == getattr(config, field.name), field.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_merging_files_gives_what_peft_merges(family: str, lora: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base(family, dtype).save_pretrained(tmp_path / "base")
    model = adapted(family, lora, dtype)
    model.save_pretrained(tmp_path / "adapter")
    convert(tmp_path / "base", tmp_path / "out", adapter=tmp_path / "adapter")
    ours = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", attn_implementation="eager"
    ).state_dict()
    theirs = model.merge_and_unload().state_dict()
    plain = base(family, dtype).state_dict()
    assert ours.keys() == theirs.keys()
    changed = [name for name, tensor in theirs.items() if not torch.equal(tensor, plain[name])]
    assert len(changed) == len(open_adapter(tmp_path / "adapter").modules)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype == dtype
        if name not in changed:
            assert torch.equal(ours[name], tensor)
        elif dtype == torch.float32:
            torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=1e-6)
        else:  # PEFT rounds the product before it adds it, so it is off by a unit in the last place of either
            largest = (tensor - plain[name]).abs().max()
            torch.testing.assert_close(ours[name], tensor, atol=float(largest) * 2**-7, rtol=2**-7)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_merged_folder_computes_what_the_adapter_computes(family: str, tmp_path: Path) -> None:
    base(family).save_pretrained(tmp_path / "base", max_shard_size="40KB")
    model = adapted(family, "all-linear")
    model.save_pretrained(tmp_path / "adapter")
    convert(tmp_path / "base", tmp_path / "out", adapter=tmp_path / "adapter", shard_bytes=20_000)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-4, rtol=1e-4)
    assert hf.open_folder(tmp_path / "out").specs == hf.open_folder(tmp_path / "base").specs
