"""Reward models on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import reward_folders
import torch

from areno_fn.contracts.batch import Drawn
from areno_fn.contracts.spec import ModelReward
from areno_fn.engine.reward_models import ModelJudge
from areno_fn.engine.rewards import Loaded, load_all
from areno_fn.world.tokenizer_bytes import ByteTokenizer

pytestmark = pytest.mark.gpu

DOCUMENTS = [[72, 101, 108, 108, 111, 257], [256], [5, 7, 258, 258], list(range(40)), [256, *range(1, 30), 257]]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_scores_on_a_gpu_are_those_of_transformers_on_the_cpu(name: str, tmp_path: Path) -> None:
    model = reward_folders.write(tmp_path, name, hidden_size=64, intermediate_size=96)
    loaded = Loaded(tokenizer=ByteTokenizer(), vocab_size=259, device=torch.device("cuda"))
    drawn = [Drawn(tokens=tuple(tokens), finished=True) for tokens in DOCUMENTS]
    wanted = reward_folders.scores(model, DOCUMENTS, 258)
    spread = max(wanted) - min(wanted)
    for dtype, error in (("float32", 1e-3), ("bfloat16", 0.1 * spread)):
        (reward,) = load_all([ModelReward(path=str(tmp_path), dtype=dtype, micro_tokens=41)], loaded)  # type: ignore[arg-type]
        assert isinstance(reward.function, ModelJudge)
        assert reward.function.model.load().head.device.type == "cuda"
        found = reward.function.judge([{}] * len(drawn), [""] * len(drawn), drawn)
        assert found == pytest.approx(wanted, abs=error), dtype
