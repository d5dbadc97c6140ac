"""Second implementations of averages, of what is derived from parameters, and of moves, each with named faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import EMA
from areno_fn.contracts.state import TrainState

Fault = str | None


def ema_update(fault: Fault) -> Callable[..., Any]:
    """The average, in float64 and rounded to float32."""

    def one(old: torch.Tensor, new: torch.Tensor, decay: float) -> torch.Tensor:
        if decay == 0 and fault == "the parameters themselves at 0":
            return new
        if decay == 1 and fault != "moves at 1":
            return old
        if decay == 0 and fault != "copies by arithmetic":
            return new.float().clone()
        d = 1 - decay if fault == "decay on the new" else min(decay, 0.999)
        if decay == 0:
            d = 0.0
        kind = new.dtype if fault == "in the dtype of the parameters" else torch.float64
        average = (old.to(kind) * d + new.to(kind) * (1 - d)).float()
        return old.copy_(average) if fault == "writes to the average" else average

    return lambda average, params, decay: tree.map(lambda old, new: one(old, new, decay), average, params)


def averaged(fault: Fault) -> Callable[..., TrainState]:
    """One optimizer step of an average with the usual warm-up."""

    def step(state: TrainState, spec: EMA) -> TrainState:
        seen, updates = int(state.controls["ema_steps"]) + 1, int(state.controls["ema_updates"])
        counted = replace(state, controls={**state.controls, "ema_steps": seen})
        number = seen - spec.start if fault == "counts from the start" else seen
        due = number % spec.every == 0 or fault == "every step"
        begun = seen > spec.start + (fault == "one step late")
        if not due or (not begun and fault == "stands still until the start"):
            return counted
        decay = min(spec.decay, (1 + updates) / (10 + updates)) if begun else 0.0
        old, new = state.snapshots["ema"]["w"], state.params["actor"]["w"]
        moved = {**counted.controls, "ema_updates": updates + (begun or fault == "copies count")}
        return replace(counted, snapshots={"ema": {"w": decay * old + (1 - decay) * new}}, controls=moved)

    return step


def snapshot(fault: Fault) -> Callable[[Any], Any]:
    """A deep copy."""

    def take(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if fault in ("the same tensors", "views"):
            return {name: leaf if fault == "the same tensors" else leaf.detach() for name, leaf in params.items()}
        copies = {id(leaf): leaf.clone() for leaf in params.values()}
        return {name: leaf.clone() if fault == "unties" else copies[id(leaf)] for name, leaf in params.items()}

    return take


def derived(fault: Fault) -> Callable[[Callable[[Any], Any]], Any]:
    """Holds what was made last, and compares sources by the tensors themselves, which it keeps."""

    class Held:
        def __init__(self, make: Callable[[Any], Any]) -> None:
            self._make, self._mark, self._kept, self._made = make, None, None, None
            self.is_held = False

        def of(self, source: Any) -> Any:
            mark = self._marked(source)
            if mark != self._mark and not (fault == "never made again" and self._mark):
                self.is_held = fault == "holds two" and self._made is not None
                self._made = self._make(source)
                self._mark, self.is_held = mark, True
                self._kept = None if fault == "by address" else tree.leaves(source)
            return self._made

        def _marked(self, source: Any) -> Any:
            leaves = tree.leaves(source)
            if fault == "by structure":
                return [leaf.shape for leaf in leaves]
            if fault == "by value of the first leaf":
                return leaves[0].tolist()
            if fault == "by address":
                return [leaf.data_ptr() for leaf in leaves]
            written = [0 if fault == "blind to writing" else leaf._version for leaf in leaves]
            return [[id(leaf) for leaf in leaves], written]

    return Held


def offload(fault: Fault) -> Callable[[Any], Any]:
    """Copies every storage once, through numpy's bytes."""

    def move(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        copies: dict[int, torch.Tensor] = {}

        def one(leaf: torch.Tensor) -> torch.Tensor:
            if fault in ("unties", "lays out anew", "views the source"):
                return {"unties": leaf.clone, "lays out anew": leaf.contiguous, "views the source": leaf.detach}[
                    fault
                ]()
            storage = leaf.untyped_storage()
            if storage.data_ptr() not in copies:
                whole = torch.empty(0, dtype=leaf.dtype).set_(storage)
                quiet = (whole.double() + 0.0).to(leaf.dtype) if fault == "quiets NaNs" else whole
                copies[storage.data_ptr()] = torch.from_numpy(quiet.numpy().copy())
            whole = copies[storage.data_ptr()]
            shape = (leaf.numel(),) if fault == "flat" else leaf.shape
            stride = (1,) if fault == "flat" else leaf.stride()
            return whole.as_strided(shape, stride, int(leaf.storage_offset()))

        return {name: one(leaf) for name, leaf in given.items()}

    return move
