"""The rewards of a run: functions and models, each made once for all phases and the evaluation."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from areno_fn.contracts.flow_batch import EachReward
from areno_fn.contracts.spec import ClipReward, HttpReward, Medium, ModelReward, RewardSpec
from areno_fn.engine.reward_models import ModelJudge, RewardModel, plan_reward_model
from areno_fn.world import rewards
from areno_fn.world.clip_score import Clip, ClipScore
from areno_fn.world.data_row import Row
from areno_fn.world.remote_reward import Remote, RemotePictures, RemoteTexts
from areno_fn.world.rewards import Reward
from areno_fn.world.tokenizer import Tokenizer


@attrs.frozen(kw_only=True)
class Loaded:
    """What rewards are made with, and what has been made so far.

    Attributes:
        device: where reward models live.
        tokenizer: of the policy, and `vocab_size`, how many tokens that can draw; None of a model without tokens.
        classes: what classes of reward functions have been made into.
        models: by the real path of the folder and the dtype, the reward models.
        clips: by the real path of the folder, the CLIP models.
    """

    device: torch.device
    tokenizer: Tokenizer | None = None
    vocab_size: int = 0
    classes: rewards.Loaded = attrs.field(factory=dict)
    models: dict[tuple[str, str], RewardModel] = attrs.field(factory=dict)
    clips: dict[str, Clip] = attrs.field(factory=dict)

    @property
    def medium(self) -> Medium:
        """What is judged."""
        return "pictures" if self.tokenizer is None else "text"

    def clip(self, path: str) -> Clip:
        """The CLIP model of a folder."""
        return self.clips.setdefault(os.path.realpath(path), Clip(path=path, device=self.device))

    def model(self, spec: ModelReward) -> RewardModel:
        """The reward model of a folder."""
        assert self.tokenizer is not None, "a model that judges text is refused for a model without tokens"
        key = (os.path.realpath(spec.path), spec.dtype)
        if key not in self.models:
            self.models[key] = plan_reward_model(spec, self.tokenizer, self.vocab_size, self.device)
        return self.models[key]


def load_all(specs: Iterable[RewardSpec], loaded: Loaded) -> tuple[Reward, ...]:
    """The rewards of a list, each under its own name; no weight is read.

    Raises:
        RewardError: a function cannot be had, or two rewards have one name.
        ModelError: a folder is not one of a reward model. CheckpointError: it is damaged or incomplete.
    """
    return rewards.require_names(tuple(_load(spec, loaded) for spec in specs))


def each_of(
    given: Sequence[Reward],
    rows: Sequence[Mapping[str, Any]],
    parts: Mapping[str, Sequence[float]],
    device: torch.device,
) -> EachReward:
    """What every reward has said, row by row.

    Args:
        given: the rewards.
        rows: of all samples.
        parts: by name, what a reward said of the rows that it judges, in their order; without those that judge none.
        device: where it is to lie.
    """
    applies = torch.tensor([[reward.judges(row) for reward in given] for row in rows])
    values = torch.zeros(applies.shape)
    for place, reward in enumerate(given):
        values[applies[:, place], place] = torch.tensor(parts.get(reward.name, []), dtype=torch.float32)
    weights = torch.tensor([reward.weight for reward in given], dtype=torch.float32)
    return EachReward(values=values.to(device), weights=weights.to(device), applies=applies.to(device))


def require_room(
    given: Sequence[Reward], rows: Sequence[Row], prompts: Sequence[Sequence[int]], completion: int
) -> None:
    """Refuses rows that a reward model which judges them cannot read.

    Args:
        rows: of the data, and `prompts`, their tokens for the policy.
        completion: most tokens of a completion.

    Raises:
        RewardError: names the row.
    """
    for reward in given:
        if isinstance(reward.function, ModelJudge):
            own = [place for place, row in enumerate(rows) if reward.judges(row)]
            reward.function.require_room([rows[i] for i in own], [prompts[i] for i in own], completion)


def models_of(given: Iterable[Reward]) -> tuple[RewardModel, ...]:
    """The reward models among rewards, each once."""
    found = {id(r.function.model): r.function.model for r in given if isinstance(r.function, ModelJudge)}
    return tuple(found.values())


def clips_of(given: Iterable[Reward]) -> tuple[Clip, ...]:
    """The CLIP models among rewards, each once."""
    found = {id(r.function.clip): r.function.clip for r in given if isinstance(r.function, ClipScore)}
    return tuple(found.values())


def _load(spec: RewardSpec, loaded: Loaded) -> Reward:
    sources = frozenset(spec.data)
    if isinstance(spec, ModelReward):
        judge = ModelJudge(model=loaded.model(spec), spec=spec)
        return Reward(name=spec.name or _folder(spec.path), weight=spec.weight, function=judge, sources=sources)
    if isinstance(spec, ClipReward):
        clip = ClipScore(clip=loaded.clip(spec.path), prompt=spec.prompt, scaled=spec.scaled, batch=spec.batch)
        return Reward(name=spec.name or _folder(spec.path), weight=spec.weight, function=clip, sources=sources)
    if isinstance(spec, HttpReward):
        name = spec.name or re.sub("[^A-Za-z0-9.]+", "_", spec.url.partition("://")[2]).strip("_")
        remote = Remote(url=spec.url, name=name, batch=spec.batch, timeout=spec.timeout, retries=spec.retries)
        asks = RemotePictures(remote) if loaded.medium == "pictures" else RemoteTexts(remote)
        return Reward(name=name, weight=spec.weight, function=asks, sources=sources)
    return rewards.load(spec, loaded.classes, loaded.medium)


def _folder(path: str) -> str:
    return Path(os.path.realpath(path)).name
