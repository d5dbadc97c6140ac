"""Whole documents judged by a model with one number a token, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import reward_folders
import torch
from hypothesis import given, settings

from areno_fn.ckpt import hf
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.valued import Valued
from areno_fn.models import valued
from areno_fn.models.decoder_policy import DecoderPolicy
from areno_fn.steps.token import judge as judging
from areno_fn.steps.token.judge import judge

PAD = 258
DOCUMENTS = [
    [72, 101, 108, 108, 111],
    [256, 49, 43, 49, 61, 50, 257],
    [256],
    [256, 257, 257],
    [5, PAD, 7],
    [5, 7, PAD, PAD],
    [PAD, PAD],
    list(range(40)),
]


def loaded(folder: Path) -> tuple[Valued, TokenPolicy]:
    opened = hf.open_folder(folder)
    family, config = valued.config_from_hf(opened.config)
    like = valued.shapes(family, config)
    params = hf.load(opened, valued.layout(family, config), like=like, dtype="source", device="cpu")
    return params, family.policy(valued.headless(config))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Valued, TokenPolicy]:
    folder = tmp_path_factory.mktemp("reward")
    reward_folders.write(folder)
    return loaded(folder)


@pytest.mark.parametrize("name", reward_folders.PEERS)
@pytest.mark.parametrize("padding", [PAD, 257, 0])
def test_scores_are_those_of_transformers(name: str, padding: int, tmp_path: Path) -> None:
    """257 is what the documents end with: transformers then looks for the last token before the ends."""
    model = reward_folders.write(tmp_path, name, pad_token_id=padding, tie_word_embeddings=name == "qwen3")
    params, policy = loaded(tmp_path)
    found = judge(policy, 8192, padding)(params, DOCUMENTS)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert found.tolist() == pytest.approx(reward_folders.scores(model, DOCUMENTS, padding), abs=1e-5)
    assert len({round(value, 4) for value in found.tolist()}) >= 6, "different documents have different scores"


@pytest.mark.parametrize("name", reward_folders.PEERS)
def test_without_padding_the_last_token_is_asked(name: str, tmp_path: Path) -> None:
    model = reward_folders.write(tmp_path, name, pad_token_id=None)
    params, policy = loaded(tmp_path)
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([document])).logits.item() for document in DOCUMENTS]
    assert judge(policy, 8192)(params, DOCUMENTS).tolist() == pytest.approx(alone, abs=1e-5)


def test_bfloat16_weights_give_float32_numbers_close_to_those_of_float32(small: tuple[Valued, TokenPolicy]) -> None:
    params, policy = small
    half: Any = torch.utils._pytree.tree_map(lambda leaf: leaf.to(torch.bfloat16), params)
    whole = judge(policy, 8192, PAD)(params, DOCUMENTS)
    assert torch.allclose(judge(policy, 8192, PAD)(half, DOCUMENTS), whole, atol=0.15, rtol=0.05)


@settings(max_examples=30)
@given(
    order=st.permutations(range(len(DOCUMENTS))),
    count=st.integers(1, len(DOCUMENTS)),
    micro_tokens=st.sampled_from([1, 7, 41, 10_000]),
)
def test_a_score_does_not_depend_on_what_is_judged_beside_it(
    small: tuple[Valued, TokenPolicy], order: list[int], count: int, micro_tokens: int
) -> None:
    params, policy = small
    alone = [judge(policy, 8192, PAD)(params, [document]).item() for document in DOCUMENTS]
    chosen = order[:count]
    found = judge(policy, micro_tokens, PAD)(params, [DOCUMENTS[place] for place in chosen])
    assert found.tolist() == pytest.approx([alone[place] for place in chosen], abs=2e-6)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_last", lambda tokens, padding: len(tokens) - 1),
        ("_last", lambda tokens, padding: max(len(tokens) - 2, 0)),
        ("_last", lambda tokens, padding: next((i - 1 for i, t in enumerate(tokens) if t == padding), len(tokens) - 1)),
        ("plan", lambda lengths, micro_tokens: [[i] for i in range(len(lengths) - 1)] + [[0]]),
        ("_packed", None),
    ],
    ids=["asked at padding", "one early", "before the first padding", "one never asked", "another order"],
)
def test_planted_mistakes_are_noticed(
    name: str, wrong: Any, small: tuple[Valued, TokenPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    params, policy = small
    wanted = reward_folders.scores(reward_folders.peer(), DOCUMENTS, PAD)
    assert judge(policy, 41, PAD)(params, DOCUMENTS).tolist() == pytest.approx(wanted, abs=1e-5)
    if name == "_packed":
        packed = judging._packed
        monkeypatch.setattr(judging, "_packed", lambda documents, padding: packed(sorted(documents, key=len), padding))
    else:
        monkeypatch.setattr(judging, name, wrong)
    assert judge(policy, 41, PAD)(params, DOCUMENTS).tolist() != pytest.approx(wanted, abs=1e-2)


def test_a_budget_bounds_what_is_read_at_once(small: tuple[Valued, TokenPolicy]) -> None:
    params, policy = small
    seen: list[int] = []

    class Watched(DecoderPolicy):
        def hidden(self, params: Any, tokens: torch.Tensor, *rest: Any, **bounds: Any) -> torch.Tensor:
            seen.append(len(tokens))
            return policy.hidden(params, tokens, *rest, **bounds)

    assert isinstance(policy, DecoderPolicy)
    judge(Watched(policy.config), 12, PAD)(params, DOCUMENTS)
    assert sum(seen) == sum(map(len, DOCUMENTS))
    assert max(seen) == 40, "a longer document is alone"
    assert sorted(seen)[-2] <= 12
    assert len(seen) > 2
