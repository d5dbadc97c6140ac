"""The folder a run writes: where everything is, and what may be overwritten."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import attrs

from areno_fn.contracts.errors import SpecError

_OWN = (
    "metrics.jsonl",
    "samples.jsonl",
    "summary.json",
    "curves.png",
    "spec.yaml",
    "tensorboard",
    "checkpoints",
    "export",
)


@attrs.frozen
class Outputs:
    """Paths inside a run's output folder."""

    root: Path

    @property
    def metrics(self) -> Path:
        """One JSON object per logged step or evaluation."""
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Completions with their rewards."""
        return self.root / "samples.jsonl"

    @property
    def summary(self) -> Path:
        """What each phase did, written at the end."""
        return self.root / "summary.json"

    @property
    def curves(self) -> Path:
        """The picture of the run."""
        return self.root / "curves.png"

    @property
    def spec(self) -> Path:
        """The resolved specification, defaults included."""
        return self.root / "spec.yaml"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Resumable states."""
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        """The trained Hugging Face folder."""
        return self.root / "export"


def prepare(path: str, *, resume: bool, overwrite: bool) -> Outputs:
    """Makes the output folder ready, or refuses before anything else is done.

    Args:
        path: the folder; parents are created.
        resume: an existing run in it is continued.
        overwrite: an existing run in it is deleted first. Only files that a run writes are touched.

    Raises:
        SpecError: it cannot be written, or holds a run and neither flag is given.
    """
    outputs = Outputs(Path(path))
    try:
        outputs.root.mkdir(parents=True, exist_ok=True)
        probe = outputs.root / f".write-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise SpecError(f"--out {path} cannot be written ({reason}); choose a folder that you may write to") from None
    present = [name for name in _OWN if (outputs.root / name).exists()]
    if present and not resume and not overwrite:
        raise SpecError(
            f"--out {path} already holds a run ({present[0]}); pass --resume to continue it, "
            f"--overwrite to start it afresh, or choose another folder"
        )
    if overwrite and not resume:
        for name in present:
            target = outputs.root / name
            shutil.rmtree(target) if target.is_dir() else target.unlink()
    return outputs
