"""What differs between models of text and of pictures: how rows become batches, and how samples are drawn, judged and shown.

Everything else of a run knows neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch

from areno_fn.contracts.actions import Metrics
from areno_fn.contracts.batch import Drawn, Pair
from areno_fn.contracts.flow_batch import EachReward
from areno_fn.contracts.spec import Phase
from areno_fn.world.data_row import Row
from areno_fn.world.rewards import Reward


@attrs.frozen(kw_only=True)
class Encoded:
    """The rows of a phase as its model takes them; one of the three holds them, in the order of the rows that are used.

    Attributes:
        examples: of an algorithm that reads a data set.
        pairs: of an algorithm that compares two answers.
        prompts: of a generating algorithm, one a row; None of any other.
    """

    examples: tuple[Any, ...] = ()
    pairs: tuple[Pair, ...] = ()
    prompts: tuple[Any, ...] | None = None

    @property
    def size(self) -> int:
        """Rows in one epoch."""
        return len(self.pairs or self.examples) if self.prompts is None else len(self.prompts)


class Medium(Protocol):
    """A medium, with what it needs of the model."""

    def require_fit(self, spec: Phase, where: str) -> None:
        """Refuses a phase whose batches the model cannot take.

        Raises:
            SpecError: names the field.
        """
        ...

    def encode(self, spec: Phase, rows: Sequence[Row]) -> Encoded:
        """The rows of a phase.

        Raises:
            DataError: a row cannot be used.
        """
        ...

    def encode_prompts(self, rows: Sequence[Row], spec: Any) -> tuple[Any, ...]:
        """The prompts of an evaluation, whose samples are drawn as `spec` says.

        Raises:
            DataError: a row cannot be used.
        """
        ...

    def require_judged(self, rewards: Sequence[Reward], rows: Sequence[Row], prompts: Sequence[Any], spec: Any) -> None:
        """Refuses rows that a reward cannot judge.

        Raises:
            RewardError: names the row.
        """
        ...

    def remarks(self, rows: Sequence[Mapping[str, Any]], *, trained: bool) -> list[str]:
        """What there is to say of rows before a run; `trained`: they are trained on as they stand."""
        ...

    def cut(self, rows: Sequence[Row]) -> list[str]:
        """What of the words of rows no encoder reads, in a sentence for each data set where there is something."""
        ...

    def batch(self, examples: Sequence[Any], rows: Sequence[int], spec: Phase) -> Any:
        """What a step is given of some rows of a data set, on the CPU."""
        ...

    def prompts(self, prompts: Sequence[Any], rows: Sequence[int], device: torch.device) -> Any:
        """What samples are drawn for, named by its rows."""
        ...

    def draw(
        self, params: Any, prompts: Sequence[Any], key: Any, spec: Any, *, device: torch.device, max_rows: int
    ) -> Any:
        """One sample for each of all prompts of an evaluation; at most so many at once."""
        ...

    def shown(self, drawn: Any) -> list[Any]:
        """What rewards are asked about, one a row."""
        ...

    def tokens(self, drawn: Any) -> list[Drawn] | None:
        """The tokens of every row, where there are any."""
        ...

    def judged(self, drawn: Any, rewards: torch.Tensor, each: EachReward) -> Any:
        """What a step is given of a rollout whose rows are worth so much, as a weighted sum and by each reward."""
        ...

    def rates(self, drawn: Any, seconds: float) -> Metrics:
        """How fast was drawn."""
        ...

    def described(self, rows: Sequence[Mapping[str, Any]], samples: Sequence[Any]) -> Metrics:
        """Numbers about the samples of an evaluation that no reward gives, without the family of their names."""
        ...

    def text(self, sample: Any) -> str:
        """A sample as text, to be logged and read."""
        ...

    @property
    def tries(self) -> int:
        """Of how many rows of a data set rewards are tried on samples before a run."""
        ...

    def rehearsed(self, row: Mapping[str, Any]) -> tuple[Any, Any]:
        """Two samples that a reward can be tried on: of nothing, and of what would be right."""
        ...

    @property
    def tried(self) -> tuple[str, str]:
        """What these two are, in words."""
        ...
