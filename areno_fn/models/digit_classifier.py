"""A small convolutional network that reads 8 x 8 digits: its parameters, its logits, and what it is trained by."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from areno_fn import random
from areno_fn.contracts.actions import Sums
from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import record, shown

SIDE, CLASSES = 8, 10
_NARROW, _WIDE, _HIDDEN = 16, 32, 64


@record
class DigitClassifier:
    """Parameters, float32.

    Attributes:
        first, first_bias: [16, 1, 3, 3], [16].
        second, second_bias: [32, 16, 3, 3], [32]; it halves the picture.
        hidden, hidden_bias: [64, 512], [64].
        out, out_bias: [10, 64], [10].
    """

    first: torch.Tensor
    first_bias: torch.Tensor
    second: torch.Tensor
    second_bias: torch.Tensor
    hidden: torch.Tensor
    hidden_bias: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor


@record
class LabelledPictures:
    """Pictures to be read.

    Attributes:
        pictures: float32 [B, 1, 8, 8], from 0 to 1.
        labels: int64 [B].
    """

    pictures: torch.Tensor
    labels: torch.Tensor

    def __check__(self) -> None:
        _check(self.pictures)


def init(key: Key) -> DigitClassifier:
    """Random parameters: matrices are normal with variance 2 / inputs, biases 0."""
    quarter = (SIDE // 2) ** 2

    def drawn(name: str, *shape: int) -> torch.Tensor:
        deviation = math.sqrt(2 / math.prod(shape[1:]))
        return random.normal(key.fold(name), torch.arange(math.prod(shape))).reshape(shape) * deviation

    return DigitClassifier(
        first=drawn("first", _NARROW, 1, 3, 3),
        first_bias=torch.zeros(_NARROW),
        second=drawn("second", _WIDE, _NARROW, 3, 3),
        second_bias=torch.zeros(_WIDE),
        hidden=drawn("hidden", _HIDDEN, _WIDE * quarter),
        hidden_bias=torch.zeros(_HIDDEN),
        out=drawn("out", CLASSES, _HIDDEN),
        out_bias=torch.zeros(CLASSES),
    )


def logits(params: DigitClassifier, pictures: torch.Tensor) -> torch.Tensor:
    """Logits float32 [B, 10] of pictures [B, 1, 8, 8].

    Raises:
        ModelError: the pictures have another shape.
    """
    _check(pictures)
    x = F.relu(F.conv2d(pictures, params.first, params.first_bias, padding=1))
    x = F.relu(F.conv2d(x, params.second, params.second_bias, stride=2, padding=1))
    x = F.relu(F.linear(x.flatten(1), params.hidden, params.hidden_bias))
    return F.linear(x, params.out, params.out_bias)


def classified(params: DigitClassifier, batch: LabelledPictures) -> Sums:
    """The objective: the cross entropy of the labels, one term a picture."""
    losses = F.cross_entropy(logits(params, batch.pictures), batch.labels, reduction="none")
    return Sums(total=losses.sum(), weight=losses.new_tensor(float(losses.shape[0])), stats={}, peaks={})


def blurred(batch: LabelledPictures, key: Key, most: float = 0.3) -> LabelledPictures:
    """The batch moved by up to a pixel, with noise of a deviation up to `most`, different for every picture.

    Args:
        batch: B pictures.
        key: names the draws.
        most: of the deviation of the noise.
    """
    rows = torch.arange(batch.labels.shape[0])
    moves = (random.uniform(key.fold("moves"), rows[:, None], torch.arange(2)) * 3).long()  # 0, 1, 2
    padded = F.pad(batch.pictures, (1, 1, 1, 1))
    windows = padded.unfold(2, SIDE, 1).unfold(3, SIDE, 1)  # [B, 1, 3, 3, 8, 8]
    moved = windows[rows, :, moves[:, 0], moves[:, 1]]
    deviation = random.uniform(key.fold("deviation"), rows).reshape(-1, 1, 1, 1) * most
    pixels = torch.arange(SIDE * SIDE)
    noise = random.normal(key.fold("noise"), rows[:, None], pixels).reshape(moved.shape)
    return LabelledPictures(pictures=(moved + deviation * noise).clamp(0, 1), labels=batch.labels)


def _check(pictures: torch.Tensor) -> None:
    if tuple(pictures.shape[1:]) != (1, SIDE, SIDE):
        raise ModelError(f"the classifier of digits reads pictures [-1, 1, {SIDE}, {SIDE}], received {shown(pictures)}")
