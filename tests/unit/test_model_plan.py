"""Which model a folder holds: the four cases of a tied head (K4)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from areno_fn.ckpt import hf
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import HFModel
from areno_fn.engine.model import from_folder


def folder_of(path: Path, *, tied: bool, head_in_file: bool) -> torch.Tensor:
    """A tiny llama; returns the matrix that its head should be."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)
    model = LlamaForCausalLM(config)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if not head_in_file:
        del state["lm_head.weight"]
    config.save_pretrained(path)
    from safetensors.torch import save_file

    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return state.get("lm_head.weight", state["model.embed_tokens.weight"])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_in_file", [True, False])
def test_K4_a_head_follows_the_file_and_is_never_made_up(tmp_path: Path, tied: bool, head_in_file: bool) -> None:
    wanted = folder_of(tmp_path / "in", tied=tied, head_in_file=head_in_file)
    model = from_folder(HFModel(path=str(tmp_path / "in")))
    params = model.load(Key.of(0), torch.device("cpu"))
    assert torch.equal(params.embed if params.head is None else params.head, wanted)
    out = hf.save(tmp_path / "out", params, model.layout, model.hf_config, source=model.folder)
    assert set(hf.open_folder(out).specs) == set(hf.open_folder(tmp_path / "in").specs)
    again = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(again.get_output_embeddings().weight, wanted)
