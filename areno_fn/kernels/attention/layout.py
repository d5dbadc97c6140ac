"""`PackedLayout`: the way from documents laid end to end to documents laid side by side, and back."""

from __future__ import annotations

import torch

from areno_fn.contracts.errors import KernelError
from areno_fn.contracts.record import record, static


@record
class PackedLayout:
    """Index tensors of one packing. Documents of one length need none: all are `None` then.

    Attributes:
        source: int64 [documents * longest], the place in the stream that each padded place reads; what lies
            past a document's end repeats the document's own last token.
        place: int64 [N], the padded place of each token of the stream.
        edges: int32 [documents + 1], where each document begins in the stream, and where the last one ends.
        documents: number of documents.
        longest: places a document gets, at least the length of the longest.
    """

    source: torch.Tensor | None
    place: torch.Tensor | None
    edges: torch.Tensor | None
    documents: int = static()
    longest: int = static()

    @property
    def tokens(self) -> int:
        """N: length of the stream."""
        return self.documents * self.longest if self.place is None else self.place.shape[0]

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """[N, ...] to [documents, longest, ...]."""
        spread = x if self.source is None else x.index_select(0, self.source)
        return spread.unflatten(0, (self.documents, self.longest))

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """[documents, longest, ...] to [N, ...]."""
        flat = x.flatten(0, 1)
        return flat if self.place is None else flat.index_select(0, self.place)


def equal_documents(documents: int, longest: int) -> PackedLayout:
    """The layout of documents that all have one length."""
    return PackedLayout(source=None, place=None, edges=None, documents=documents, longest=longest)


def packed_layout(segments: torch.Tensor, bounds: tuple[int, int] | None = None) -> PackedLayout:
    """The layout of a packed stream.

    Args:
        segments: int64 [N], the document of each token: 0, 0, .., 1, 1, .., non-decreasing without gaps.
        bounds: (number of documents, length of the longest or more), so that no value has to be read from the
            device. They are checked on the CPU, outside a compiled graph, and believed elsewhere.

    Raises:
        KernelError: the stream is empty, the documents are not numbered as above, or the bounds are not theirs.
    """
    if segments.ndim != 1 or segments.dtype != torch.int64 or not segments.shape[0]:
        raise KernelError(
            f"attention: segments must be int64 [N] with at least one token, "
            f"received {str(segments.dtype).removeprefix('torch.')} {list(segments.shape)}"
        )
    if bounds is None or (segments.device.type == "cpu" and not torch.compiler.is_compiling()):
        bounds = _checked(segments, bounds)
    documents, longest = bounds
    if segments.shape[0] == documents * longest:
        return equal_documents(documents, longest)
    numbers = torch.arange(documents + 1, device=segments.device)
    edges = torch.searchsorted(segments, numbers)
    starts, ends = edges[:-1, None], edges[1:, None]
    within = torch.arange(longest, device=segments.device)
    source = torch.minimum(starts + within, ends - 1).flatten()
    place = torch.arange(segments.shape[0], device=segments.device) + (numbers * longest - edges)[segments]
    return PackedLayout(source=source, place=place, edges=edges.to(torch.int32), documents=documents, longest=longest)


def _checked(segments: torch.Tensor, bounds: tuple[int, int] | None) -> tuple[int, int]:
    """The bounds of the stream; those given must agree with it."""
    lengths = torch.unique_consecutive(segments, return_counts=True)[1]
    documents, longest = lengths.shape[0], int(lengths.max())
    numbered = torch.repeat_interleave(torch.arange(documents, device=segments.device), lengths)
    if not torch.equal(numbered, segments):
        raise KernelError("attention: segments must count the documents 0, 0, .., 1, 1, .. in order and without gaps")
    if bounds is None:
        return documents, longest
    if bounds[0] != documents or bounds[1] < longest:
        raise KernelError(
            f"attention: bounds say {bounds[0]} documents of at most {bounds[1]} tokens, "
            f"but segments has {documents} of at most {longest}"
        )
    return bounds
