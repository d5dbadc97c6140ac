"""SHA-256 computed in a thread, while the pieces that it is the sum of are read or written."""

from __future__ import annotations

import hashlib
from concurrent import futures
from types import TracebackType


class Digest:
    """The SHA-256 of pieces in their order. A context manager, whose thread ends with the block.

    One piece is in hand at a time, so that no more of them than that are kept in memory.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksum")
        self._pending: futures.Future[None] | None = None

    def __enter__(self) -> Digest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()

    def update(self, piece: bytes | memoryview) -> None:
        """Adds a piece, which must not change before the next call; returns when the one before it is done."""
        self._settle()
        self._pending = self._thread.submit(self._hash.update, piece)

    def hexdigest(self) -> str:
        """The sum of all pieces so far."""
        self._settle()
        return self._hash.hexdigest()

    def _settle(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None
