"""`RunIdentity`: what must be equal for a saved state to continue as the same run."""

from __future__ import annotations

import hashlib
from typing import Any

import attrs
import msgspec

from areno_fn.contracts.errors import CheckpointError


@attrs.frozen(kw_only=True)
class RunIdentity:
    """Digests of everything that decides what the next step computes.

    How long a run goes on, how it logs and how often it saves are not part of it.
    """

    family: str
    model: str
    phases: str
    data: str
    parameters: str
    optimizers: str
    seed: int

    def differences(self, other: RunIdentity) -> dict[str, tuple[Any, Any]]:
        """The fields in which two identities differ, with both values."""
        a, b = attrs.asdict(self), attrs.asdict(other)
        return {name: (a[name], b[name]) for name in a if a[name] != b[name]}

    def require(self, saved: RunIdentity, where: str) -> None:
        """Refuses to continue another run.

        Raises:
            CheckpointError: names every field that differs.
        """
        different = self.differences(saved)
        if different:
            shown = "; ".join(f"{name} was {was} and is now {now}" for name, (now, was) in different.items())
            raise CheckpointError(
                f"{where} belongs to another run: {shown}; resume with the specification it was started with"
            )


def digest(value: Any) -> str:
    """A short hash of a value built from msgspec structs, dicts, lists and scalars; the order of keys does not matter."""
    data = msgspec.msgpack.encode(msgspec.to_builtins(value, order="deterministic"), order="deterministic")
    return hashlib.sha256(data).hexdigest()[:16]
