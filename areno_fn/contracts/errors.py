"""Every error a user can cause. Each message is one sentence: what is wrong, where, and what would be right."""

from __future__ import annotations


class ArenoError(Exception):
    """Base of all errors that name a user's mistake; the command line prints it and exits with 2."""


class SpecError(ArenoError, ValueError):
    """A run specification is malformed or asks for something that cannot be done."""


class JoinError(ArenoError, TypeError):
    """Two stages of a pipeline do not fit together."""


class RecordError(ArenoError, ValueError):
    """A record was built from values that break its contract."""


class ImmutableError(ArenoError, AttributeError):
    """A record was written to."""


class DonatedError(ArenoError, RuntimeError):
    """A record was read after it had been handed over with `donate`."""


class LayoutError(ArenoError, ValueError):
    """A checkpoint layout is not a bijection, or does not meet the tensors it is given."""


class CheckpointError(ArenoError, ValueError):
    """A checkpoint folder is missing, damaged, or not the one that was asked for."""


class ModelError(ArenoError, ValueError):
    """A model configuration has a field that this library does not support, or a model was given tokens it cannot read."""


class DataError(ArenoError, ValueError):
    """A data row cannot be used."""


class RewardError(ArenoError, ValueError):
    """A reward function failed or returned something that is not one float per completion."""


class KernelError(ArenoError, ValueError):
    """A kernel was given tensors whose shape, dtype or device it does not work on."""


class DivergenceError(ArenoError, ArithmeticError):
    """A loss or a gradient is no longer a finite number."""
