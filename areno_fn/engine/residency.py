"""Records that leave the memory of a device between their uses: `offload` and `onload` move them whole and exactly.

Storages are moved, not elements: dtypes, strides and bits stay, and leaves that share memory share it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from areno_fn import tree
from areno_fn.contracts.errors import RecordError
from areno_fn.contracts.record import replace, shown
from areno_fn.contracts.spec import Snapshot
from areno_fn.contracts.state import TrainState
from areno_fn.engine.derived import Derived
from areno_fn.steps.recipes import REFERENCE, SHELVES
from areno_fn.steps.variants import Shelf

T = TypeVar("T")


def offload(record: T) -> T:
    """A copy in the memory of the host, page-locked where there is a GPU; returns when it is whole.

    The given one is untouched, and what is done to it later does not show in the copy. Leaves that are no tensors, and
    meta tensors, stay as they are.

    Raises:
        RecordError: a leaf is not a dense tensor.
    """
    pinned = torch.cuda.is_available()
    return _moved(record, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=pinned))


def onload(record: T, device: torch.device | str) -> T:
    """A copy in the memory of a device; the inverse of `offload`, bit for bit.

    Args:
        record: any tree of tensors.
        device: where the copy lies. On the CPU that is host memory again, not page-locked.

    Raises:
        RecordError: a leaf is not a dense tensor, or there is no such device.
    """
    try:
        place = torch.device(device)
    except RuntimeError:
        raise RecordError(f"onload: {device!r} is no device; write 'cpu' or 'cuda'") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise RecordError(f"onload: the device is {str(place)!r}, but torch sees no CUDA device")
    return _moved(record, lambda size: torch.empty(size, dtype=torch.uint8, device=place))


class Residency:
    """Where the snapshots of a phase lie.

    Args:
        away: names of those that stay in host memory between their uses.
        device: where they are used.
        hold: a fetched reference stays on the device until `release`, because several calls in a row need it.
    """

    def __init__(self, away: Collection[Snapshot], device: torch.device, *, hold: bool = False) -> None:
        self._away = frozenset(away)
        self._fetched: Derived[Any] = Derived(partial(onload, device=device))
        apart = Shelf(put=offload, take=partial(onload, device=device))
        held = Shelf(put=offload, take=self._fetched.of)
        self.shelves: Mapping[str, Shelf] = {
            **SHELVES,
            **{name: held if hold and name == REFERENCE else apart for name in self._away},
        }

    def release(self) -> None:
        """Lets go of what has been fetched."""
        self._fetched.clear()

    def expected(self, state: TrainState) -> TrainState:
        """A state of meta tensors in which what lies on the host does, so that it is loaded there; its memory is not touched."""
        return self._changed(state, partial(tree.map, lambda leaf: torch.empty_like(leaf, device="cpu")))

    def settled(self, state: TrainState) -> TrainState:
        """A loaded state with page-locked memory for what lies on the host."""
        return self._changed(state, offload)

    def _changed(self, state: TrainState, change: Callable[[Any], Any]) -> TrainState:
        changed = {name: change(own) for name, own in state.snapshots.items() if name in self._away}
        return replace(state, snapshots={**state.snapshots, **changed})


def _moved(record: T, room: Callable[[int], torch.Tensor]) -> T:
    """Starts the copies of all storages, and waits once for each device that takes part."""
    copies: dict[int, torch.Tensor] = {}
    devices: set[torch.device] = set()

    def move(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.is_meta:
            return leaf
        if leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg():
            raise RecordError(f"{path} is {shown(leaf)} of layout {leaf.layout}; only dense tensors can be moved")
        storage = leaf.untyped_storage()
        key = storage._cdata
        if key not in copies:
            copies[key] = room(storage.nbytes())
            copies[key].copy_(_bytes(storage), non_blocking=True)
            devices.update(place.device for place in (leaf, copies[key]) if place.is_cuda)
        made = torch.empty(0, dtype=leaf.dtype, device=copies[key].device)
        return made.set_(copies[key].untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())

    found = tree.map_with_path(move, record)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return found


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
