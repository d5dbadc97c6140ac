"""Text: rows are tokenised, completions are drawn token by token, rewards are asked about their text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.batch import Drawn, JudgedRollout, PackedTokens, Prompts, Rollout
from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.execution import Acquisition
from areno_fn.contracts.flow_batch import EachReward
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import DPO, Phase, Sampled, Sampling
from areno_fn.engine import text
from areno_fn.engine.medium import Encoded
from areno_fn.engine.rewards import require_room
from areno_fn.steps.token.pack import micro_batches
from areno_fn.world.data_row import Row
from areno_fn.world.examples import encode_examples, encode_prompts, plain_questions
from areno_fn.world.preferences import encode_pairs
from areno_fn.world.rewards import Reward, texts
from areno_fn.world.tokenizer import Tokenizer


@attrs.frozen(kw_only=True)
class Text:
    """The medium of a model of tokens.

    Attributes:
        tokenizer: text to tokens and back.
        rollout: decodes.
        positions: of the model's context.
    """

    tokenizer: Tokenizer
    rollout: Callable[..., Rollout]
    positions: int

    def require_fit(self, spec: Phase, where: str) -> None:
        """Refuses rows beyond the model's context."""
        if spec.batch.max_length > self.positions:
            raise SpecError(
                f"{where}.batch.max_length: {spec.batch.max_length} is beyond the model's context of {self.positions} "
                f"positions; lower it to that or less"
            )

    def encode(self, spec: Phase, rows: Sequence[Row]) -> Encoded:
        """The rows of a phase as tokens."""
        longest, overlong = spec.batch.max_length, spec.batch.overlong
        if isinstance(spec.algorithm, DPO):
            return Encoded(pairs=encode_pairs(rows, self.tokenizer, longest, overlong))
        if spec.algorithm.execution.acquisition is Acquisition.DATASET:
            return Encoded(examples=tuple(encode_examples(rows, self.tokenizer, longest, overlong)))
        return Encoded(prompts=encode_prompts(rows, self.tokenizer, longest - completion_tokens(spec)))

    def encode_prompts(self, rows: Sequence[Row], spec: Sampling) -> tuple[tuple[int, ...], ...]:
        """The prompts of an evaluation, which leave room for the completion."""
        return encode_prompts(rows, self.tokenizer, self.positions - spec.max_tokens)

    def require_judged(
        self, rewards: Sequence[Reward], rows: Sequence[Row], prompts: Sequence[Sequence[int]], spec: Phase | Sampling
    ) -> None:
        """Refuses rows that a reward model cannot read."""
        longest = spec.max_tokens if isinstance(spec, Sampling) else completion_tokens(spec)
        require_room(rewards, rows, prompts, longest)

    def remarks(self, rows: Sequence[Mapping[str, Any]], *, trained: bool) -> list[str]:
        """How many questions have no chat template to go through."""
        questions = plain_questions(rows, self.tokenizer, trained=trained)
        said = "because the tokenizer has no chat template"
        if not questions:
            return []
        if questions == 1:
            return [f"1 question or instruction becomes a plain text that ends its line, {said}"]
        return [f"{questions} questions or instructions become plain texts that end their line, {said}"]

    def cut(self, rows: Sequence[Row]) -> list[str]:
        """Nothing: what is too long is refused, or cut as the phase says."""
        del rows
        return []

    def batch(self, examples: Sequence[Any], rows: Sequence[int], spec: Phase) -> tuple[PackedTokens, ...]:
        """Micro-batches of packed documents."""
        return micro_batches([examples[row] for row in rows], spec.batch.micro_tokens, few_sizes=spec.capture)

    def prompts(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], device: torch.device) -> Prompts:
        """The prompts of some rows, padded."""
        return pad_prompts(prompts, rows, device)

    def draw(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        key: Key,
        spec: Sampling,
        *,
        device: torch.device,
        max_rows: int,
    ) -> Rollout:
        """One completion a prompt."""
        padded = self.prompts(prompts, range(len(prompts)), device)
        return self.rollout(params, padded, key, spec, max_rows=max_rows)

    def shown(self, drawn: Rollout) -> list[str]:
        """The text of every completion."""
        return text.completions(drawn, self.tokenizer)

    def tokens(self, drawn: Rollout) -> list[Drawn] | None:
        """Prompt and completion of every row."""
        return text.drawn(drawn)

    def judged(self, drawn: Rollout, rewards: torch.Tensor, each: EachReward) -> JudgedRollout:
        """The rollout with its rewards, of which the sum counts."""
        del each
        return JudgedRollout(rollout=drawn, rewards=rewards)

    def rates(self, drawn: Rollout, seconds: float) -> Metrics:
        """Tokens drawn per second."""
        return {"rollout/tokens_per_s": float(drawn.lengths.sum()) / max(seconds, 1e-9)}

    def described(self, rows: Sequence[Mapping[str, Any]], samples: Sequence[str]) -> Metrics:
        """Nothing beyond what rewards say."""
        del rows, samples
        return {}

    def text(self, sample: str) -> str:
        """The completion itself."""
        return sample

    @property
    def tries(self) -> int:
        """One row of a data set, since to ask about one more may take as long again."""
        return 1

    def rehearsed(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """No text, and the row's `answer` or `response`."""
        return texts(row)

    @property
    def tried(self) -> tuple[str, str]:
        """The words for these two."""
        return "no text", "the answer"


def completion_tokens(spec: Phase) -> int:
    """Most tokens that a phase draws of a completion; 0 for an algorithm that draws none."""
    return spec.algorithm.sampling.max_tokens if isinstance(spec.algorithm, Sampled) else 0


def pad_prompts(prompts: Sequence[Sequence[int]], rows: Sequence[int], device: torch.device) -> Prompts:
    """The prompts of some rows, right-padded; a prompt's id is its row, so draws do not depend on the batch.

    A row that is there again has an id of its own, beyond those of all rows.
    """
    chosen = [prompts[row] for row in rows]
    tokens = torch.zeros(len(chosen), max(len(p) for p in chosen), dtype=torch.int64)
    for i, prompt in enumerate(chosen):
        tokens[i, : len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(p) for p in chosen])
    ids = torch.tensor(names_of(rows, len(prompts)))
    return Prompts(tokens=tokens.to(device), lengths=lengths.to(device), ids=ids.to(device))


def names_of(rows: Sequence[int], size: int) -> list[int]:
    """The id of every row of a batch: the row, and for one that is there again a number of its own beyond those of all rows."""
    seen: Counter[int] = Counter()
    ids = []
    for row in rows:
        ids.append(row + seen[row] * size)
        seen[row] += 1
    return ids
