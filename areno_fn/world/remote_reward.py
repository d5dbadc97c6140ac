"""Judges behind an address: samples are posted as JSON, in batches, and asked about again where no answer comes."""

from __future__ import annotations

import base64
import http.client
import io
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import msgspec
import numpy as np

from areno_fn.contracts.errors import RewardError
from areno_fn.world.pictures import as_image

Rows = Sequence[Mapping[str, Any]]

BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers after which it is worth asking again."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before the second attempt, doubled from then on, and their limit."""


class _Unanswered(Exception):
    """No answer came, but one may yet."""


class _Refused(Exception):
    """The answer will not be another one."""


@attrs.frozen(kw_only=True, eq=False)
class Remote:
    """An address that judges samples.

    Attributes:
        url: where to.
        name: of the reward, for messages.
        batch: most samples at once.
        timeout: seconds that an answer may take.
        retries: further attempts.
        wait: called with seconds, between attempts.
    """

    url: str
    name: str
    batch: int = 16
    timeout: float = 60.0
    retries: int = 3
    wait: Callable[[float], None] = time.sleep

    def judged(self, rows: Rows, field: str, samples: Sequence[Any]) -> list[float]:
        """A number for each sample.

        Args:
            rows: the data row of every sample.
            field: what the samples are called in the request.
            samples: plain data.

        Raises:
            RewardError: there is no answer after all attempts, or it is not one number for each sample.
        """
        found: list[float] = []
        for start in range(0, len(samples), self.batch):
            part = slice(start, start + self.batch)
            body = {"rows": [dict(row) for row in rows[part]], field: list(samples[part])}
            found += self._asked(msgspec.json.encode(body), len(samples[part]))
        return found

    def _asked(self, body: bytes, count: int) -> list[float]:
        failed = ""
        for attempt in range(self.retries + 1):
            if attempt:
                self.wait(min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT))
            try:
                return _numbers(self._answer(body), count)
            except _Unanswered as error:
                failed = str(error)
            except _Refused as error:
                raise RewardError(
                    f"the reward {self.name!r} at {self.url} answered what is of no use: {error}"
                ) from None
        raise RewardError(
            f"the reward {self.name!r} at {self.url} gave no answer in {self.retries + 1} attempts, at last because {failed}; "
            f"see whether it runs, or raise `timeout` or `retries`"
        )

    def _answer(self, body: bytes) -> bytes:
        asked = urllib.request.Request(self.url, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=self.timeout) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            told = f"status {error.code} ({error.reason})"
            raise (_Unanswered if error.code in BUSY else _Refused)(told) from None
        except TimeoutError:
            raise _Unanswered(f"nothing came within {self.timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Unanswered(f"{type(error).__name__}: {' '.join(str(error).split())}") from None


@attrs.frozen
class RemotePictures:
    """A reward that asks a `Remote` about pictures."""

    remote: Remote

    def __call__(self, rows: Rows, pictures: Sequence[np.ndarray[Any, Any]]) -> list[float]:
        """A number for each picture, float32 [C, S, S] from 0 to 1, which is sent as a PNG file in base64."""
        return self.remote.judged(rows, "pictures", [_png(picture) for picture in pictures])


@attrs.frozen
class RemoteTexts:
    """A reward that asks a `Remote` about texts."""

    remote: Remote

    def __call__(self, rows: Rows, completions: Sequence[str]) -> list[float]:
        """A number for each completion."""
        return self.remote.judged(rows, "completions", completions)


def _numbers(answer: bytes, count: int) -> list[float]:
    try:
        found = msgspec.json.decode(answer, type=dict[str, Any])["rewards"]
        values = msgspec.convert(found, list[float])
    except (msgspec.MsgspecError, KeyError):
        raise _Refused(f'it must be {{"rewards": [{count} numbers]}}, received {answer[:80]!r}') from None
    if len(values) != count:
        raise _Refused(f"it has {len(values)} rewards for {count} samples")
    return values


def _png(picture: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    as_image(picture).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()
