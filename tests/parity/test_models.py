"""The dense families against transformers: logits, gradients, and what the two read from one configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areno_fn import tree
from areno_fn.autodiff import value_and_grad
from areno_fn.models import FAMILIES, family_of
from areno_fn.models.decoder import Decoder, DecoderConfig, Layer
from areno_fn.models.decoder_forward import forward

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 5000.0},
    "linear": {"rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn": {
        "rope_theta": 100.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 2.0,
            "beta_slow": 0.5,
        },
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-mha": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "llama-wide-heads": {"head_dim": 12, "num_key_value_heads": 1},
    "qwen2": {},
    "qwen2-tied-mqa": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3": {"head_dim": 16},
    "qwen3-tied-biased": {"head_dim": 6, "tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 4},
}
LENGTHS = (5, 1, 17, 2, 1, 30)


def build(variant: str, rope: str) -> tuple[Any, Decoder, DecoderConfig]:
    """A transformers model with random numbers in every parameter, and the same model here."""
    fields = {**SIZES, **ROPES[rope], **VARIANTS[variant], "model_type": variant.split("-")[0]}
    config = family_of(fields).config_from_hf(fields)
    hf = AutoConfig.for_model(**{k: dict(v) if isinstance(v, dict) else v for k, v in fields.items()})
    model = AutoModelForCausalLM.from_config(hf, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.3, generator=generator).add_(1.0 if "norm" in name else 0.0)
    return model, to_params(model, config), config


def to_params(model: Any, config: DecoderConfig) -> Decoder:
    """The parameters of a transformers model, laid out by hand."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def joined(layer: str, kind: str, *names: str) -> torch.Tensor | None:
        parts = [state.get(f"{layer}.{name}.{kind}") for name in names]
        return None if parts[0] is None else torch.cat(parts)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        return Layer(
            attn_norm=state[f"{at}.input_layernorm.weight"],
            qkv=joined(attention, "weight", "q_proj", "k_proj", "v_proj"),
            qkv_bias=joined(attention, "bias", "q_proj", "k_proj", "v_proj"),
            q_norm=state.get(f"{attention}.q_norm.weight"),
            k_norm=state.get(f"{attention}.k_norm.weight"),
            o=state[f"{attention}.o_proj.weight"],
            o_bias=state.get(f"{attention}.o_proj.bias"),
            mlp_norm=state[f"{at}.post_attention_layernorm.weight"],
            gate_up=joined(mlp, "weight", "gate_proj", "up_proj"),
            gate_up_bias=joined(mlp, "bias", "gate_proj", "up_proj"),
            down=state[f"{mlp}.down_proj.weight"],
            down_bias=state.get(f"{mlp}.down_proj.bias"),
        )

    return Decoder(
        embed=state["model.embed_tokens.weight"],
        layers=tuple(layer(i) for i in range(config.num_layers)),
        norm=state["model.norm.weight"],
        head=None if config.tie_embeddings else state["lm_head.weight"],
    )


def packed(lengths: tuple[int, ...], vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random documents of the given lengths: tokens, positions, segments."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, vocab, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return tokens, positions, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def reference_logits(model: Any, tokens: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Every document alone through transformers."""
    return torch.cat([model(document[None]).logits[0] for document in tokens.split(lengths)])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_layout_of_the_family_lays_out_what_was_laid_out_by_hand(variant: str) -> None:
    model, params, config = build(variant, "default")
    state = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight" or not config.tie_embeddings}
    layout = family_of({"model_type": model.config.model_type}).layout(config, head_in_file="lm_head.weight" in state)
    laid = layout(state)
    assert sorted(laid) == sorted(path for path, _ in tree.leaves_with_path(params))
    for path, leaf in tree.leaves_with_path(params):
        assert torch.equal(laid[path], leaf), path


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_packed_documents_equal_transformers(variant: str, rope: str) -> None:
    model, params, config = build(variant, rope)
    tokens, positions, segments = packed(LENGTHS, config.vocab_size)
    with torch.no_grad():
        wanted = reference_logits(model, tokens, LENGTHS)
    got = forward(params, config, tokens, positions, segments)
    assert got.dtype == torch.float32
    assert wanted.abs().max() > 0.5  # the numbers are large enough for the bound to mean something
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_transformers(variant: str) -> None:
    model, params, config = build(variant, "default")
    tokens, positions, segments = packed(LENGTHS, config.vocab_size)
    weight = torch.linspace(-1, 1, config.vocab_size)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return (logits.log_softmax(-1) * weight).mean()

    loss(reference_logits(model, tokens, LENGTHS)).backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad  # so that one function lays out weights and gradients
    wanted = to_params(model, config)
    _, got = value_and_grad(lambda p: loss(forward(p, config, tokens, positions, segments)))(params)
    for ours, theirs in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        assert theirs.abs().max() > 1e-4
        assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("variant", ["llama", "qwen2-tied-mqa", "qwen3"])
def test_bfloat16_logits_are_as_near_as_bfloat16_allows(variant: str) -> None:
    model, params, config = build(variant, "default")
    tokens, positions, segments = packed(LENGTHS, config.vocab_size)
    with torch.no_grad():
        wanted = reference_logits(model, tokens, LENGTHS)
        theirs = reference_logits(model.bfloat16(), tokens, LENGTHS).float()
    low = tree.map(lambda x: x.bfloat16(), params)
    got = forward(low, config, tokens, positions, segments)
    assert got.dtype == torch.bfloat16
    error, floor = (got.float() - wanted).norm() / wanted.norm(), (theirs - wanted).norm() / wanted.norm()
    assert 0 < floor < 0.05
    assert error < 1.5 * floor


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_reads_a_written_configuration_as_the_same_model(variant: str) -> None:
    for rope in ROPES:
        model, params, config = build(variant, rope)
        family = FAMILIES[variant.split("-")[0]]
        written = family.config_to_hf(config)
        twin = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written))
        assert [type(twin).__name__] == written["architectures"]
        assert twin.dtype == torch.float32
        twin.load_state_dict(model.state_dict())
        tokens, positions, segments = packed((9,), config.vocab_size)
        with torch.no_grad():
            wanted = twin(tokens[None]).logits[0]
        torch.testing.assert_close(forward(params, config, tokens, positions, segments), wanted, atol=1e-5, rtol=1e-5)
        assert family.config_from_hf(twin.config.to_dict()) == config


@pytest.mark.parametrize("name", FAMILIES)
def test_the_defaults_of_transformers_are_read(name: str) -> None:
    hf = AutoConfig.for_model(name)
    config = FAMILIES[name].config_from_hf(hf.to_dict())
    assert config.num_layers == hf.num_hidden_layers
    assert config.head_dim == 128
    assert config.rope.theta == hf.rope_parameters["rope_theta"]
    assert config.max_positions == hf.max_position_embeddings
