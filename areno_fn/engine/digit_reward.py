"""How legible drawn digits are: a reward by a classifier that is trained on real digits when it is first asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import AdamWSpec, DigitsData, Schedule
from areno_fn.contracts.state import Counters, Cursor, TrainState
from areno_fn.models.digit_classifier import DigitClassifier, LabelledPictures, blurred, classified, init, logits
from areno_fn.steps.compose import train_step
from areno_fn.steps.optimizers import adamw
from areno_fn.steps.recipes import ACTOR
from areno_fn.world import digits
from areno_fn.world.order import batch_rows, next_position

STEPS, ROWS = 400, 128


def trained_classifier(key: Key, steps: int = STEPS) -> DigitClassifier:
    """A classifier of digits, trained on the training pictures moved and noised: a function of the key, within seconds.

    It is trained as any model of the library is, by `train_step`.

    Args:
        key: of its start and of all that is drawn.
        steps: of the optimizer, each on 128 pictures.
    """
    real = labelled(digits.rows(DigitsData()))
    params = init(key.fold("init"))
    optimizer = adamw(AdamWSpec(lr=3e-3, schedule=Schedule(kind="linear", warmup_steps=20)), steps)
    step = train_step(classified, optimizer)
    state = TrainState(
        params={ACTOR: params},
        optim={ACTOR: optimizer.init(params)},
        snapshots={},
        counters=Counters(),
        key=key,
        cursor=Cursor(),
    )
    size, place = real.labels.shape[0], (0, 0)
    for number in range(steps):
        rows = batch_rows(key.fold("order"), *place, size, ROWS)
        place = next_position(*place, size, ROWS)
        batch = LabelledPictures(pictures=real.pictures[rows], labels=real.labels[rows])
        state, _ = step(state, (blurred(batch, key.fold("blur").fold(number)),))
    trained: DigitClassifier = state.params[ACTOR]
    return trained


def labelled(rows: Sequence[Mapping[str, Any]]) -> LabelledPictures:
    """The pictures and the classes of rows of digits."""
    return LabelledPictures(
        pictures=torch.tensor([row["picture"] for row in rows]).unsqueeze(1),
        labels=torch.tensor([row["label"] for row in rows]),
    )


class Legible:
    """The probability that the classifier gives the class that a picture was to be of.

    The classifier is trained when it is first asked, always from the same key.
    """

    def __call__(self, rows: Sequence[Mapping[str, Any]], pictures: Sequence[np.ndarray[Any, Any]]) -> list[float]:
        """A number from 0 to 1 for each picture float32 [1, 8, 8].

        Args:
            rows: what the pictures are of, their `label`.
            pictures: from 0, paper, to 1, ink.
        """
        labels = torch.tensor([row["label"] for row in rows])
        given: list[float] = _probabilities(pictures)[torch.arange(labels.shape[0]), labels].tolist()
        return given


class Recognised:
    """1 where the same classifier takes a picture for what it was to be of, and 0 elsewhere: its mean is an accuracy."""

    def __call__(self, rows: Sequence[Mapping[str, Any]], pictures: Sequence[np.ndarray[Any, Any]]) -> list[float]:
        """0 or 1 for each picture; arguments as for `Legible`."""
        labels = torch.tensor([row["label"] for row in rows])
        given: list[float] = (_probabilities(pictures).argmax(-1) == labels).float().tolist()
        return given


@cache
def _classifier() -> DigitClassifier:
    return trained_classifier(Key.of(0).fold("legible"))


def _probabilities(pictures: Sequence[np.ndarray[Any, Any]]) -> torch.Tensor:
    """Of every class, float32 [B, 10]."""
    with torch.no_grad():
        return logits(_classifier(), torch.from_numpy(np.stack(pictures))).softmax(-1)
