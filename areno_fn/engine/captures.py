"""Where the captured updates of a phase are kept."""

from __future__ import annotations

import torch

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import Phase
from areno_fn.steps.capture import Graphs


def graphs_of(spec: Phase, device: torch.device) -> Graphs | None:
    """Where the graphs of a phase are kept, of all its roles together; None of a phase that is not captured.

    Raises:
        SpecError: the run is on a CPU.
    """
    if not spec.capture:
        return None
    if device.type != "cuda":
        raise SpecError(
            f"phases.{spec.name}.capture: updates are captured as graphs of a GPU, and this run is on the {device.type.upper()}; "
            f"use device = 'cuda', or remove this"
        )
    return Graphs()
