"""Buffers that are allocated once and taken in turn, through which bytes go to a device or are converted."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PIECE = 1 << 23
"""Bytes that are read or copied at once."""


class Lane:
    """A buffer on the host and, for CUDA, the stream on which it is copied. The buffer is allocated when first used."""

    def __init__(self, device: torch.device) -> None:
        self._buffer: torch.Tensor | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def buffer(self, nbytes: int) -> torch.Tensor:
        """At least `nbytes` bytes that no copy needs any longer."""
        self.wait()
        if self._buffer is None or self._buffer.numel() < nbytes:
            pinned = self.stream is not None
            self._buffer = torch.empty(max(nbytes, PIECE), dtype=torch.uint8, pin_memory=pinned)
        return self._buffer[:nbytes]

    def wait(self) -> None:
        """Returns when every copy that was begun is done."""
        if self.stream is not None:
            self.stream.synchronize()

    def fetch(self, piece: torch.Tensor, into: torch.Tensor) -> None:
        """Begins to copy a tensor of the device into a part of the buffer."""
        if self.stream is None:
            into.copy_(piece)
            return
        self.stream.wait_stream(torch.cuda.current_stream(piece.device))
        with torch.cuda.stream(self.stream):
            into.copy_(piece, non_blocking=True)

    def move(self, filled: torch.Tensor, out: torch.Tensor) -> None:
        """Copies what stands in the buffer to its place; converts when the dtypes differ. May return before it is done."""
        if self.stream is None:
            out.copy_(filled)
            return
        with torch.cuda.stream(self.stream):
            # converted on the device, where it costs nothing beside the copy
            out.copy_(
                filled if filled.dtype == out.dtype else filled.to(out.device, non_blocking=True), non_blocking=True
            )


class Ring:
    """Lanes that threads take in turn. Two for each thread let it read into one while the other is copied."""

    def __init__(self, device: torch.device, lanes: int) -> None:
        self.device = device
        self._lanes = [Lane(device) for _ in range(lanes)]
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for lane in self._lanes:
            self._free.put(lane)

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """The lane that has been free for longest."""
        lane = self._free.get()
        try:
            yield lane
        finally:
            self._free.put(lane)

    def begin(self) -> None:
        """Copies that follow come after everything that was asked of the device before."""
        for lane in self._lanes:
            if lane.stream is not None:
                lane.stream.wait_stream(torch.cuda.current_stream(self.device))

    def finish(self) -> None:
        """Returns when every copy is done."""
        for lane in self._lanes:
            lane.wait()
