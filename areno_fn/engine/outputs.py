"""The folder a run writes: where everything is, and what may be overwritten."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import Lora, RunSpec

OWN = (
    "checkpoints",  # goes first: what is left of a run that is half removed cannot be continued
    "metrics.jsonl",
    "samples.jsonl",
    "pictures",
    "summary.json",
    "curves.png",
    "spec.yaml",
    "tensorboard",
    "export",
    "adapter",
    "critic",
    "fake",
    "surrogate",
    "export_ema",
    "adapter_ema",
)
"""All that runs write into their folder, and so all that `--overwrite` removes from it."""

_FILES = ("metrics.jsonl", "samples.jsonl", "summary.json", "curves.png", "spec.yaml")
"""Those of them that are files; the others are folders."""

_ALWAYS = OWN[: OWN.index("adapter")]


def written(spec: RunSpec) -> tuple[str, ...]:
    """The names in the output folder that a run of this specification writes."""
    lora, ema = isinstance(spec.finetune, Lora), spec.phases[-1].ema
    averaged = ema is not None and ema.export
    asked = {
        "adapter": lora,
        **{role: role in spec.export.roles for role in ("critic", "fake", "surrogate")},
        "export_ema": averaged,
        "adapter_ema": lora and averaged,
    }
    return _ALWAYS + tuple(name for name, wanted in asked.items() if wanted)


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
    def pictures(self) -> Path:
        """Sheets of drawn pictures, one file an evaluation; of a model that makes pictures."""
        return self.root / "pictures"

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
        """The trained Hugging Face folder; of a run that trains adapters, the PEFT folder `adapter` stands beside it.

        So does the folder of a role, where a specification asks for it. An average has folders of its own, `export_ema`
        and `adapter_ema`.
        """
        return self.root / "export"

    @property
    def results(self) -> list[Path]:
        """The trained models and adapters that are there."""
        names = ("export", *OWN[len(_ALWAYS) :])
        return [path for path in _present(self) if path.name in names]

    def left_over(self, spec: RunSpec) -> list[Path]:
        """What is there that a run of this specification does not write; it may be all that is left of something."""
        names = set(written(spec))
        return [path for path in _present(self) if path.name not in names]


def inspect(path: str, *, resume: bool, overwrite: bool, occupied: bool = False) -> Outputs:
    """Refuses an output folder that a run could not use, and changes nothing.

    Args:
        path: the folder; it need not exist.
        resume: an existing run in it is continued.
        overwrite: an existing run in it is deleted first.
        occupied: nothing will be written, so that a run in it is no reason to refuse.

    Raises:
        SpecError: it cannot be written, or holds a run and none of these is given.
    """
    if resume and overwrite:
        raise SpecError("--resume continues the run in the output folder and --overwrite deletes it; pass one of them")
    if not path:
        raise _unwritable(path, "it names no folder")
    outputs = Outputs(Path(path))
    nearest = next(folder for folder in (outputs.root, *outputs.root.absolute().parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        raise _unwritable(path, f"{nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _unwritable(path, f"no permission to write in {nearest}")
    try:
        os.stat(outputs.root)
    except FileNotFoundError:
        return outputs
    except (OSError, ValueError) as error:  # a name that is too long, or holds a NUL
        raise _unwritable(path, f"{getattr(error, 'strerror', error)}") from None
    present = _present(outputs)
    if present and not (resume or overwrite or occupied):
        raise SpecError(f"out: {held(outputs)}")
    # what is overwritten goes, but for the specification, whose place the new one takes
    for target in present if resume else [outputs.spec] if outputs.spec.is_dir() else []:
        _require_kind(target)
    return outputs


def _require_kind(path: Path) -> None:
    """Refuses what a continued run would write into, where it is of another kind than a run leaves it."""
    file = path.name in _FILES
    if not (path.is_file() if file else path.is_dir()):
        raise SpecError(
            f"out: {path} is no {'file' if file else 'folder'}, as a run needs it; move it elsewhere, or choose another folder"
        )


def held(outputs: Outputs) -> str | None:
    """That a folder already holds a run, and what a new one in it would need; None where it holds none."""
    present = _present(outputs)
    if not present:
        return None
    return (
        f"{outputs.root} already holds a run ({present[0].name}); pass --resume to continue it, --overwrite to start it "
        f"afresh, or choose another folder"
    )


@contextmanager
def prepare(path: str, *, resume: bool, overwrite: bool) -> Iterator[Outputs]:
    """Makes the output folder ready, or refuses before anything else is done; no other run may have it meanwhile.

    Args:
        path: the folder; parents are created.
        resume: an existing run in it is continued.
        overwrite: an existing run in it is deleted first. Only files that a run writes are touched; its specification,
            which may be the one that is carried out, stays until the new one takes its place.

    Raises:
        SpecError: as `inspect`, or another run is using it.
    """
    outputs = inspect(path, resume=resume, overwrite=overwrite)
    with _opened(outputs) as folder:
        _hold(folder, outputs)
        try:
            for target in [path for path in _present(outputs) if overwrite and path != outputs.spec]:
                # of a link the link alone is the run's
                shutil.rmtree(target) if target.is_dir() and not target.is_symlink() else target.unlink()
        except OSError as error:
            raise _unwritable(path, f"{error.filename}: {error.strerror}") from None
        yield outputs


@contextmanager
def _opened(outputs: Outputs) -> Iterator[int]:
    """The descriptor of the folder, which exists by then and has been written to."""
    try:
        outputs.root.mkdir(parents=True, exist_ok=True)
        probe = outputs.root / f".write-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
        folder = os.open(outputs.root, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(str(outputs.root), f"{error.filename}: {error.strerror}") from None
    try:
        yield folder
    finally:
        os.close(folder)


def _hold(folder: int, outputs: Outputs) -> None:
    """Locks the folder until it is closed, as it is however the process ends; where files cannot be locked, does nothing."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            raise SpecError(
                f"out: another run is writing to {outputs.root}; wait for its end, or choose another folder"
            ) from None


def _present(outputs: Outputs) -> list[Path]:
    return [outputs.root / name for name in OWN if os.path.lexists(outputs.root / name)]


def _unwritable(path: str, reason: str) -> SpecError:
    return SpecError(
        f"out: {path or 'the empty path'} cannot be written ({reason}); choose a folder that you may write to"
    )
