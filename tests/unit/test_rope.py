"""Rotary frequencies: worked values, transformers, and every way a configuration may write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from areno_fn.contracts.errors import ModelError
from areno_fn.models.fields import Fields
from areno_fn.models.rope import TYPES, Rope, inverse_frequencies, yarn_band
from areno_fn.models.rope_fields import rope_from_hf, rope_to_hf

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(table: dict[str, Any], positions: int = 2048) -> Rope:
    fields = Fields(table, "config")
    rope = rope_from_hf(fields, positions)
    fields.finish()
    return rope


def plain(theta: float, head_dim: int) -> torch.Tensor:
    return theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def test_N3_llama3_keeps_fast_pairs_divides_slow_ones_and_blends_three() -> None:
    rope = read({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}})
    frequencies, scale = inverse_frequencies(rope, 64)
    assert scale == 1.0
    assert frequencies.dtype == torch.float32
    before = plain(5e5, 64)
    torch.testing.assert_close(frequencies[:15].double(), before[:15], rtol=1e-6, atol=0)
    torch.testing.assert_close(frequencies[18:].double(), before[18:] / 32, rtol=1e-6, atol=0)
    assert torch.all((frequencies[15:18] < before[15:18] * 0.999) & (frequencies[15:18] > before[15:18] / 31.9))
    assert float(before[16]) == pytest.approx(0.0014142, rel=1e-4)
    assert float(frequencies[16]) == pytest.approx(0.00042956, rel=1e-4)


def test_N3_the_factor_is_read_and_both_spellings_of_the_type_are() -> None:
    eight = read({"rope_scaling": {"type": "llama3", **LLAMA3, "factor": 8.0}})
    assert (eight.type, eight.factor) == ("llama3", 8.0)
    ratio = (
        inverse_frequencies(eight, 64)[0][-1]
        / inverse_frequencies(read({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}), 64)[0][-1]
    )
    assert float(ratio) == pytest.approx(4.0)


def test_N4_yarn_with_a_lower_bound_of_zero() -> None:
    rope = Rope(type="yarn", theta=1e4, factor=40.0, original_positions=64)
    assert yarn_band(rope, 128) == (0, 17)
    frequencies, scale = inverse_frequencies(rope, 128)
    before = plain(1e4, 128)
    assert float(frequencies[0]) == float(before[0]) == 1.0
    assert float(frequencies[17]) == pytest.approx(float(before[17]) / 40, rel=1e-6)
    assert float(frequencies[16]) > float(before[16]) / 40 * 1.5
    assert scale == pytest.approx(0.1 * 3.6888794541139363 + 1)


def test_N4_yarn_with_an_empty_band_is_a_step() -> None:
    # both bounds round to 0, where dividing by their distance would give NaN
    rope = Rope(type="yarn", theta=1e4, factor=40.0, original_positions=6)
    assert yarn_band(rope, 128) == (0, 0)
    frequencies, _ = inverse_frequencies(rope, 128)
    before = plain(1e4, 128)
    assert float(frequencies[0]) == 1.0
    torch.testing.assert_close(frequencies[1:].double(), before[1:] / 40, rtol=1e-6, atol=0)


@given(
    theta=st.sampled_from([100.0, 1e4, 5e5, 1e6]),
    half=st.integers(2, 64),
    factor=st.floats(1.0, 64.0),
    original=st.integers(16, 32768),
    kind=st.sampled_from(TYPES),
    attention=st.none() | st.floats(0.5, 2.0),
    mscale=st.none() | st.floats(0.5, 2.0),
    truncate=st.booleans(),
)
def test_frequencies_are_those_of_transformers(
    theta: float,
    half: int,
    factor: float,
    original: int,
    kind: str,
    attention: float | None,
    mscale: float | None,
    truncate: bool,
) -> None:
    head_dim = 2 * half
    table: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    if kind != "default":
        table["factor"] = factor
    if kind in ("llama3", "yarn"):
        table["original_max_position_embeddings"] = original
    if kind == "llama3":
        table |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        table |= {
            "attention_factor": attention,
            "mscale": mscale,
            "mscale_all_dim": mscale and 1.0,
            "truncate": truncate,
        }
    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        rope_parameters=dict(table),
        max_position_embeddings=original,
    )
    got, scale = inverse_frequencies(read({"rope_parameters": table}), head_dim)
    if kind == "default":
        torch.testing.assert_close(got.double(), plain(theta, head_dim), rtol=2e-6, atol=0)
        return
    wanted, wanted_scale = ROPE_INIT_FUNCTIONS[kind](config)
    assert torch.equal(got, wanted)
    assert scale == wanted_scale


@pytest.mark.parametrize(
    "rope",
    [
        Rope(theta=7.0),
        Rope(type="linear", theta=7.0, factor=2.5),
        Rope(type="llama3", factor=8.0, original_positions=100, low_freq_factor=2.0, high_freq_factor=3.0),
        Rope(type="yarn", factor=8.0, original_positions=100, beta_fast=9.0, beta_slow=2.0, truncate=False),
        Rope(type="yarn", factor=8.0, original_positions=100, attention_factor=1.5, mscale=1.0, mscale_all_dim=0.5),
    ],
)
def test_what_is_written_is_read_back(rope: Rope) -> None:
    assert read({"rope_parameters": rope_to_hf(rope)}) == rope
    assert hash(rope) == hash(read({"rope_parameters": rope_to_hf(rope)}))


def test_old_and_new_spellings_mean_the_same() -> None:
    old = {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    }
    new = {"rope_parameters": {**old["rope_scaling"], "rope_theta": 1e6, "rope_type": "yarn"}}
    assert read(old) == read(new) == Rope(type="yarn", theta=1e6, factor=4.0, original_positions=32768)
    assert read({"rope_theta": 100000, "rope_scaling": None}) == Rope(theta=100000.0)
    assert read({}) == Rope(theta=10000.0)


def test_the_original_context_defaults_to_the_context() -> None:
    assert read({"rope_scaling": {"type": "yarn", "factor": 2.0}}, positions=512).original_positions == 512


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "config, rope_scaling: rope_type 'dynamic' is not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "config, rope_parameters: rope_type 'longrope' is not supported",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number, received '2'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be above 0, received 0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "extra": 1}}, "the field 'extra' is unknown"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            "type is 'linear' and rope_type is 'yarn'",
        ),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "high_freq_factor is 1.0, but it must be above",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
            "rope_theta is 10000.0 here and 50000.0 in",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_parameters and rope_scaling are both given",
        ),
        ({"rope_theta": True}, "rope_theta must be a number, received True"),
        ({"rope_parameters": [1]}, "rope_parameters must be a table"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "the field 'full_attention' is unknown"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as refusal:
        read(table)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_type_that_does_not_exist_cannot_be_built() -> None:
    with pytest.raises(
        ModelError, match="rope type 'su' is not supported; the supported ones are default, linear, llama3, yarn"
    ):
        Rope(type="su")
