"""Reward models: frozen models with one number a text, planned from headers alone and read when they are first asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from areno_fn.ckpt import hf
from areno_fn.ckpt.content import content_of
from areno_fn.contracts.batch import Drawn
from areno_fn.contracts.errors import ArenoError, DataError, ModelError, RewardError
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.spec import HFTokenizer, ModelReward
from areno_fn.contracts.valued import Valued
from areno_fn.engine.finetune import count
from areno_fn.engine.tokenizer_files import tokenizer_files
from areno_fn.engine.valued_folder import ValuedFolder, open_valued
from areno_fn.steps.token.judge import judge
from areno_fn.world import tokenizer as tokenizers
from areno_fn.world.data_row import Row
from areno_fn.world.data_schema import prompt
from areno_fn.world.examples import encode_prompt
from areno_fn.world.judged_text import encode_judged
from areno_fn.world.rewards import Judge
from areno_fn.world.tokenizer import Tokenizer

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


@attrs.frozen(kw_only=True, eq=False)
class RewardModel:
    """A reward model of a run; all rewards that name its folder share it, in training and evaluation.

    Attributes:
        source: where its parameters are; they belong to no role, so no optimizer, state or export has them.
        device: where they will be.
        tokenizer: its own.
        as_drawn: it reads tokens as the policy drew them; else the text in tokens of its own.
    """

    source: ValuedFolder
    device: torch.device
    tokenizer: Tokenizer
    as_drawn: bool
    _read: list[Valued] = attrs.field(factory=list, init=False, repr=False)

    @property
    def folder(self) -> hf.HFFolder:
        """The folder that it is read from."""
        return self.source.folder

    @property
    def policy(self) -> TokenPolicy:
        """The functions of its trunk."""
        return self.source.policy

    @property
    def padding(self) -> int | None:
        """The token that its configuration calls padding, which it is never asked at."""
        found = self.folder.config.get("pad_token_id")
        return found if isinstance(found, int) else None

    @property
    def in_memory(self) -> bool:
        """Its parameters have been read."""
        return bool(self._read)

    def load(self, progress: hf.Progress | None = None) -> Valued:
        """The parameters, read once."""
        if not self.in_memory:
            self._read.append(self.source.load(self.device, progress))
        return self._read[0]

    def content(self) -> str:
        """A digest of all that decides what it says."""
        return content_of(self.folder, tokenizer_files(self.folder.path))

    def read(self, row: Mapping[str, Any], completion: str, drawn: Drawn) -> Sequence[int]:
        """The tokens by which it judges a completion.

        Raises:
            RewardError: they are more than it has positions for, or its chat template refuses the messages.
        """
        if self.as_drawn:
            return drawn.tokens
        assert isinstance(row, Row), "the rows of a run say where they stand"
        try:
            ids = encode_judged(row, completion, drawn.finished, self.tokenizer)
        except DataError as error:
            raise RewardError(f"the reward model {self.folder.path} cannot read a completion: {error}") from error
        if len(ids) > self.policy.max_positions:
            raise RewardError(
                f"the reward model {self.folder.path} has {self.policy.max_positions} positions, but a completion of "
                f"{row.where} and its prompt have {len(ids)} of its tokens; lower max_tokens, or shorten the prompt"
            )
        return ids


@attrs.frozen(kw_only=True)
class ModelJudge(Judge):
    """One reward of a specification that a model gives: its numbers, shifted and clipped."""

    model: RewardModel
    spec: ModelReward

    def judge(
        self, rows: Sequence[Mapping[str, Any]], completions: Sequence[str], drawn: Sequence[Drawn]
    ) -> list[float]:
        """A number for each completion; what else is judged at the same time does not matter."""
        model = self.model
        documents = [model.read(*given) for given in zip(rows, completions, drawn, strict=True)]
        ask = judge(model.policy, self.spec.micro_tokens, model.padding)
        scores = ask(model.load(), documents) - self.spec.shift
        return (scores.clamp(-self.spec.clip, self.spec.clip) if self.spec.clip else scores).tolist()

    def describe(self) -> str:
        """What is asked, in words."""
        model = self.model
        size = count(model.source.shapes())
        reads = "the tokens as drawn" if model.as_drawn else "the text with a tokenizer of its own"
        return f"the {model.source.family.name} in {model.folder.path} with {size:,} frozen parameters, which reads {reads}"

    def require_room(self, rows: Sequence[Row], prompts: Sequence[Sequence[int]], completion: int) -> None:
        """Refuses rows whose prompts the model cannot read, or has no positions for.

        Args:
            rows: those that it judges, and `prompts`, their tokens for the policy.
            completion: most tokens of a completion.

        Raises:
            RewardError: names the row.
        """
        model = self.model
        for row, tokens in zip(rows, prompts, strict=True):
            needed = len(tokens) + completion if model.as_drawn else len(self._asked(row)) + 1
            if needed > model.policy.max_positions:
                raise RewardError(
                    f"the reward model {model.folder.path} has {model.policy.max_positions} positions, but the prompt of "
                    f"{row.where} and a completion need {needed}; shorten the prompt, or lower max_tokens"
                )

    def _asked(self, row: Row) -> list[int]:
        try:
            return encode_prompt(prompt(row), self.model.tokenizer, row.where)
        except ArenoError as error:
            raise RewardError(f"the reward model {self.model.folder.path} cannot read a prompt: {error}") from error


def clip_content(path: str) -> str:
    """A digest of all that decides what the CLIP model of a folder says.

    Raises:
        CheckpointError: the folder is damaged or incomplete.
    """
    folder = hf.open_folder(path)
    beside = [name for name in _PROCESSORS if (folder.path / name).is_file()]
    return content_of(folder, [*tokenizer_files(folder.path), *beside])


def plan_reward_model(spec: ModelReward, tokenizer: Tokenizer, vocab_size: int, device: torch.device) -> RewardModel:
    """A reward model that can be read.

    Args:
        tokenizer: the policy's, and `vocab_size`, how many tokens it can draw.

    Raises:
        ModelError: the folder is not one of a model with one number a text, or its embedding is too small.
        CheckpointError: it is damaged or incomplete, or has no tokenizer.
    """
    # with transformers, which takes seconds to import, and a run without reward models may not need
    from areno_fn.world.tokenizer_same import same_tokens

    source = open_valued(spec.path, spec.dtype)
    own = tokenizers.load(HFTokenizer(path=spec.path), extra_eos=tokenizers.declared_eos(spec.path))
    if own.vocab_size > source.config.vocab_size:
        raise ModelError(
            f"{source.folder.path}: its tokenizer has {own.vocab_size} tokens, but the model embeds "
            f"{source.config.vocab_size}; "
            f"put the tokenizer there that it was trained with"
        )
    return RewardModel(
        source=source,
        device=device,
        tokenizer=own,
        as_drawn=same_tokens(tokenizer, own) and vocab_size <= source.config.vocab_size,
    )
