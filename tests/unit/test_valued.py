"""Models with one number a token: values, how they begin, and their layout, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from areno_fn import tree
from areno_fn.ckpt import hf
from areno_fn.contracts.errors import ModelError, RecordError
from areno_fn.contracts.key import Key
from areno_fn.contracts.valued import Valued
from areno_fn.models import FAMILIES, valued

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
PEERS = {
    "llama": transformers.LlamaForSequenceClassification,
    "qwen2": transformers.Qwen2ForSequenceClassification,
    "qwen3": transformers.Qwen3ForSequenceClassification,
}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_for_classification_gives_the_numbers_that_transformers_gives(
    name: str, tied: bool, tmp_path: Path
) -> None:
    kind = PEERS[name]
    torch.manual_seed(0)
    peer = kind(kind.config_class(**SIZES, num_labels=1, tie_word_embeddings=tied)).eval()
    peer.save_pretrained(tmp_path)
    folder = hf.open_folder(tmp_path)
    family, config = valued.config_from_hf(folder.config)
    assert family is FAMILIES[name]
    layout = valued.layout(family, config)
    params = hf.load(folder, layout, like=valued.shapes(family, config), dtype="source", device="cpu")

    tokens = torch.tensor([3, 5, 7, 11, 13])
    policy = family.policy(valued.headless(config))
    hidden = policy.hidden(params.trunk, tokens, torch.arange(5), torch.zeros(5, dtype=torch.int64))
    expected = peer(tokens[None]).logits.squeeze()  # of the last token
    assert torch.allclose((hidden @ params.head.T)[-1, 0], expected, atol=1e-6)

    written = hf.save(tmp_path / "again", params, layout, folder.config)
    again = kind.from_pretrained(written).eval()
    assert torch.equal(again(tokens[None]).logits, peer(tokens[None]).logits)


def test_a_critic_begins_as_a_copy_of_a_model_and_says_0() -> None:
    family = FAMILIES["qwen3"]
    config = family.config_from_hf({**SIZES, "model_type": "qwen3", "tie_word_embeddings": False})
    model = family.init(config, Key.of(1))
    begun = valued.begin(model)
    like = valued.shapes(family, config)
    assert [(path, leaf.shape) for path, leaf in tree.leaves_with_path(begun)] == [
        (path, leaf.shape) for path, leaf in tree.leaves_with_path(like)
    ]
    own = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(model)}
    assert own.isdisjoint(leaf.untyped_storage().data_ptr() for leaf in tree.leaves(begun))
    assert torch.equal(begun.trunk.embed, model.embed) and not begun.head.any()


def test_a_folder_of_another_kind_is_refused() -> None:
    named = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(
        ModelError, match=r"architectures is \['LlamaForCausalLM'\], but a model with one number a text"
    ):
        valued.config_from_hf(named)
    several = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    with pytest.raises(ModelError, match="has 2 labels"):
        valued.config_from_hf(several)
    with pytest.raises(ModelError, match="has 3 labels"):
        valued.config_from_hf(several | {"id2label": {"0": "a", "1": "b", "2": "c"}})


@pytest.mark.parametrize("name", PEERS)
def test_the_configuration_of_a_critic_is_that_of_a_model_for_classification(name: str) -> None:
    family = FAMILIES[name]
    named = family.config_to_hf(family.config_from_hf({**SIZES, "model_type": name}))
    written = valued.config_to_hf(named)
    assert written["architectures"] == [PEERS[name].__name__]
    assert valued.config_from_hf(written) == (family, family.config_from_hf(named))


def test_a_head_is_one_row() -> None:
    with pytest.raises(RecordError, match=r"Valued.head must be \[1, D\], received f32\[2,3\]"):
        Valued(trunk={}, head=torch.zeros(2, 3))
