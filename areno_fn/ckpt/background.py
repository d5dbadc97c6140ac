"""Writing resumable state in a thread while training goes on."""

from __future__ import annotations

import threading
from concurrent import futures
from pathlib import Path
from types import TracebackType

import attrs
import torch

from areno_fn.ckpt.resume import prepare, write
from areno_fn.ckpt.snapshot import HostMemory
from areno_fn.ckpt.trees import walk
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.roles import RoleLayout
from areno_fn.contracts.state import TrainState


class Writer:
    """Saves states of one run as `save_state` does, but in a thread. A context manager.

        with Writer(root, identity, roles=roles, keep=2) as writer:
            writer.save(step, state)  # returns when `state` may be overwritten

    At most one state is being written: a second `save` waits for the first. Leaving the block waits until the
    last one is whole, however the block is left; the thread ends there. Interrupted while it waits (Ctrl-C once
    more), it gives that write up, and the state before it stays.

    Args:
        root: folder of all states of the run; made when it is missing.
        identity: the run.
        roles: who owns which parameters, as for `save_state`.
        keep: how many of the newest states stay.
    """

    def __init__(
        self, root: str | Path, identity: RunIdentity, *, roles: RoleLayout | None = None, keep: int = 2
    ) -> None:
        self._root = Path(root)
        self._identity = identity
        self._roles = roles
        self._keep = keep
        self._memory = HostMemory()
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: futures.Future[Path] | None = None
        self._reserved: futures.Future[None] | None = None
        self._given_up = threading.Event()

    def __enter__(self) -> Writer:
        return self

    @property
    def is_writing(self) -> bool:
        """Whether something that was saved is not yet whole on the disk."""
        return self._pending is not None and not self._pending.done()

    def reserve(self, state: TrainState) -> None:
        """Begins to take the memory that copies of such states need, so that the first `save` need not.

        Args:
            state: has the structure of those that will be saved; nothing of it is kept.
        """
        # what is one tensor at the beginning, such as parameters and their reference, need not stay one
        tensors = [leaf for _, leaf, _ in walk(state) if isinstance(leaf, torch.Tensor)]
        sizes = [(tensor.numel() * tensor.itemsize, tensor.is_cuda) for tensor in tensors]
        on_host, on_gpu = ([size for size, is_cuda in sizes if is_cuda is there] for there in (False, True))
        self._reserved = self._thread.submit(self._memory.reserve, on_host, on_gpu)

    def save(self, step: int, state: TrainState) -> None:
        """Takes a copy of a state and begins to write it.

        Args:
            step: a number that grows with the run.
            state: may be overwritten as soon as this returns.

        Raises:
            CheckpointError: the state cannot be stored, or the write before this one failed.
            RecordError: the state does not have the roles.
        """
        self.wait()
        if self._reserved is not None:
            self._reserved.result()
        prepared = prepare(state, self._roles)
        copied = attrs.evolve(prepared.flat, tensors=self._memory.copy(prepared.flat.tensors))
        snapshot = attrs.evolve(prepared, flat=copied)
        self._pending = self._thread.submit(
            write, self._root, step, snapshot, self._identity, self._keep, self._unless_given_up
        )

    def wait(self) -> None:
        """Returns when everything that was saved is whole on the disk.

        Raises:
            CheckpointError: it could not be written; older states are whole.
        """
        if self._pending is not None:
            futures.wait([self._pending])
            pending, self._pending = self._pending, None
            pending.result()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except KeyboardInterrupt:
            self._given_up.set()
            raise
        except CheckpointError as failure:
            # neither may hide the other: an interrupted run ends with this one, a failed run with both
            if not isinstance(error, Exception):
                raise
            error.add_note(str(failure))
        finally:
            self._thread.shutdown()

    def _unless_given_up(self) -> None:
        if self._given_up.is_set():
            raise CheckpointError(f"writing to {self._root} was interrupted; what was there before is untouched")
