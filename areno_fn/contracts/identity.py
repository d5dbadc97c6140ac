"""`RunIdentity`: what must be equal for a saved state to continue as the same run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import msgspec

from areno_fn.contracts.errors import CheckpointError, SpecError

ACCEPTABLE: Mapping[str, str] = MappingProxyType(
    {
        "phases": "the run goes on in the same phase with the new settings, at the same epoch and batch",
        "data": "the run goes on at the same epoch and batch of the new rows, or with the next epoch where there is no such batch",
        "optimizers": "what the optimizer has gathered is kept, and the new settings hold from the next update on",
        "seed": "everything that is drawn from here on follows the new seed, the order of rows included",
    }
)
"""Fields in which a run may differ from the one it continues when its user says so, and what that means."""

NEVER: Mapping[str, str] = MappingProxyType(
    {
        "family": "another family computes something else from the same numbers",
        "model": "under another configuration the parameters mean something else",
        "parameters": "the saved tensors do not have the shapes and dtypes of the new ones",
    }
)
"""Fields that cannot be accepted, and why."""


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

    def require(self, saved: RunIdentity, where: str, accept: Iterable[str] = ()) -> None:
        """Refuses to continue another run.

        Args:
            saved: the identity of what is to be continued, and `where` it is.
            accept: fields that may differ.

        Raises:
            CheckpointError: names every other field that differs.
            SpecError: a field that cannot be accepted.
        """
        different = self.refused(saved, accept)
        if different:
            shown = "; ".join(f"{name} was {was} and is now {now}" for name, (now, was) in different.items())
            raise CheckpointError(f"{where} belongs to another run: {shown}; {way_out(different)}")

    def refused(self, saved: RunIdentity, accept: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
        """The differences that are not accepted.

        Raises:
            SpecError: a field that cannot be accepted.
        """
        accepted = check_accepted(accept)
        return {name: values for name, values in self.differences(saved).items() if name not in accepted}


def check_accepted(fields: Iterable[str]) -> frozenset[str]:
    """The fields that may differ, when all of them can be accepted.

    Raises:
        SpecError: one cannot, or there is none of that name.
    """
    if isinstance(fields, str) or not isinstance(fields, Iterable):
        raise SpecError(f"accept: it is a list of fields, as in ['phases'], received {fields!r}")
    accepted = frozenset(fields)
    for name in sorted(accepted - ACCEPTABLE.keys()):
        reason = NEVER.get(name, "an identity has no such field")
        raise SpecError(f"accept: {name!r} cannot be accepted, {reason}; what can be is {', '.join(ACCEPTABLE)}")
    return accepted


def way_out(fields: Iterable[str]) -> str:
    """What to do about fields that differ: the end of a sentence."""
    names = list(fields)
    flags = "" if set(names) & NEVER.keys() else " ".join(f"--accept {name}" for name in names)
    return f"resume with the specification it was started with{f', or pass {flags}' if flags else ''}"


def digest(value: Any) -> str:
    """A short hash of a value built from msgspec structs, dicts, lists and scalars; the order of keys does not matter."""
    data = msgspec.msgpack.encode(msgspec.to_builtins(value, order="deterministic"), order="deterministic")
    return hashlib.sha256(data).hexdigest()[:16]
