"""`load_hf` and `save_hf`: there and back, bit for bit; the rest is tested with `ckpt`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from areno_fn import load_hf, save_hf, tree
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import ScratchModel
from areno_fn.engine.model import from_scratch

SMALL = {
    "vocab_size": 19,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = from_scratch(ScratchModel(family="qwen3", config=SMALL))
    params = model.load(Key.of(1), torch.device("cpu"))
    out = save_hf(tmp_path / "made", params, model)
    (out / "tokenizer.json").write_text("{}")
    return out


def tensors(folder: Path) -> dict[str, Any]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_a_folder_goes_through_memory_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    model, params = load_hf(folder)
    again = save_hf(tmp_path / "again", params, model)
    assert tree.first_difference(tensors(folder), tensors(again)) is None
    assert (again / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert (again / "tokenizer.json").read_text() == "{}"


def test_the_policy_belongs_to_the_parameters(folder: Path) -> None:
    model, params = load_hf(str(folder))
    tokens, zeros = torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.int64)
    hidden = model.policy.hidden(params, tokens, torch.arange(3), zeros)
    assert model.policy.logits(params, hidden).shape == (3, 19)


def test_parameters_are_converted_on_the_way_in_and_back_on_the_way_out(folder: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    model, params = load_hf(folder, dtype="bfloat16", progress=lambda done, total, *_: told.append((done, total)))
    assert {leaf.dtype for leaf in tree.leaves(params)} == {torch.bfloat16}
    assert told[-1][0] == told[-1][1] > 0
    written = tensors(save_hf(tmp_path / "again", params, model))
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    rounded = {name: tensor.bfloat16().float() for name, tensor in tensors(folder).items()}
    assert tree.equal(written, rounded)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json"):
        load_hf(tmp_path)


@pytest.mark.parametrize("path", ["x" * 300, "a\0b"], ids=["long", "NUL"])
def test_a_path_that_can_be_none_is_refused(path: str) -> None:
    with pytest.raises(CheckpointError, match="a Hugging Face folder is needed"):
        load_hf(path)


def stored_as(folder: Path, dtypes: dict[str, torch.dtype]) -> Path:
    """The folder, with the tensors that hold one of the words in their name stored anew."""
    held = tensors(folder)
    for word, dtype in dtypes.items():
        held |= {name: tensor.to(dtype) for name, tensor in held.items() if word in name}
    save_file(held, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("policy", ["source", "float32"])
def test_weights_that_cannot_be_trained(folder: Path, dtype: torch.dtype, policy: Any) -> None:
    short = str(dtype).removeprefix("torch.")
    with pytest.raises(CheckpointError, match=rf"'model.embed_tokens.weight' is stored as {short} \(1 such tensors\)"):
        load_hf(stored_as(folder, {"embed": dtype}), dtype=policy)


@pytest.mark.parametrize("word", ["embed", "down_proj"])
def test_weights_that_cannot_be_multiplied_with_each_other(folder: Path, word: str) -> None:
    mixed = stored_as(folder, {word: torch.float16})
    with pytest.raises(
        CheckpointError, match="which cannot be multiplied with each other; load with the dtype 'float32'"
    ):
        load_hf(mixed)
    for policy in ("float32", "bfloat16"):
        model, params = load_hf(mixed, dtype=policy)  # type: ignore[arg-type]
        assert model.policy.hidden(params, *packed()).isfinite().all()


@pytest.mark.parametrize("norms", [torch.float32, torch.float16])
def test_norms_may_have_a_dtype_of_their_own(folder: Path, norms: torch.dtype) -> None:
    model, params = load_hf(stored_as(folder, {"": torch.bfloat16, "norm": norms}))
    assert {leaf.dtype for leaf in tree.leaves(params)} == {torch.bfloat16, norms}
    assert model.policy.hidden(params, *packed()).dtype == torch.bfloat16


def packed() -> tuple[torch.Tensor, ...]:
    return torch.tensor([1, 2, 3]), torch.arange(3), torch.zeros(3, dtype=torch.int64)
