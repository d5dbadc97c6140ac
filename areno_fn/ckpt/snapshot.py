"""Copies of a state on the host, in memory that is taken once and used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

_BLOCK = 1 << 30
_ALIGN = 64


class HostMemory:
    """Where a snapshot of a state stays while it is written.

    One snapshot at a time: taking the next one overwrites the last. Tensors of a GPU go to page-locked memory,
    which the GPU writes at full speed without the processor.
    """

    def __init__(self) -> None:
        self._plain = _Arena(pinned=False)
        self._pinned = _Arena(pinned=True)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def nbytes(self) -> int:
        """Bytes taken so far."""
        return self._plain.nbytes + self._pinned.nbytes

    def reserve(self, on_host: Sequence[int], on_gpu: Sequence[int]) -> None:
        """Takes the memory that a copy will need, which lasts longer than the copy itself.

        Args:
            on_host: bytes of each tensor of the processor, in their order.
            on_gpu: the same for those of GPUs.
        """
        self._plain.reserve(on_host)
        self._pinned.reserve(on_gpu)

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies that nothing written to the tensors from here on can change; returns when they are made.

        Args:
            tensors: on any devices, with any strides.

        Returns:
            Contiguous CPU tensors of the same shapes and dtypes, valid until the next call.
        """
        on_gpu = {name: tensor for name, tensor in tensors.items() if tensor.is_cuda}
        on_host = {name: tensor for name, tensor in tensors.items() if not tensor.is_cuda}
        copies = self._pinned.places(on_gpu) | self._plain.places(on_host)
        # the copies of all GPUs run at once, and those of the processor beside them
        events = [self._start(device, on_gpu, copies) for device in dict.fromkeys(t.device for t in on_gpu.values())]
        for name, tensor in on_host.items():
            copies[name].copy_(tensor.detach())
        for event in events:
            event.synchronize()
        return copies

    def _start(
        self, device: torch.device, tensors: Mapping[str, torch.Tensor], copies: Mapping[str, torch.Tensor]
    ) -> torch.cuda.Event:
        """Starts the copies from one GPU, behind the work that makes their contents."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for name, tensor in tensors.items():
                if tensor.device == device:
                    copies[name].copy_(tensor.detach(), non_blocking=True)
            return stream.record_event()


class _Arena:
    """Blocks of bytes that are handed out from the beginning each time.

    Page-locked memory comes in powers of two, so blocks have such sizes: what is lost is less than one block
    and the rest of the tensors that are larger than a block.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._is_pinned = pinned
        self._blocks: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(block.numel() for block in self._blocks)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Takes as much memory as tensors of so many bytes each need, and makes the system provide it."""
        before = len(self._blocks)
        self._spans(sizes)
        for block in self._blocks[before:]:
            block.zero_()

    def places(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Uninitialised tensors of the shapes and dtypes of these; equal requests get equal places."""
        spans = self._spans([_size(tensor) for tensor in tensors.values()])
        return {
            name: span.view(tensor.dtype).reshape(tensor.shape)
            for (name, tensor), span in zip(tensors.items(), spans, strict=True)
        }

    def _spans(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        padded = [-(-size // _ALIGN) * _ALIGN for size in sizes]
        total = sum(padded)
        found, number, used = [], 0, 0
        for size, room in zip(sizes, padded, strict=True):
            while number < len(self._blocks) and used + room > self._blocks[number].numel():
                number, used = number + 1, 0
            if number == len(self._blocks):
                self._blocks.append(self._block(max(room, min(total, _BLOCK))))
            found.append(self._blocks[number][used : used + size])
            used += room
        return found

    def _block(self, size: int) -> torch.Tensor:
        length = 1 << (size - 1).bit_length() if size else 0
        return torch.empty(length, dtype=torch.uint8, pin_memory=self._is_pinned)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize
