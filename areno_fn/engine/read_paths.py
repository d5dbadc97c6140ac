"""What a run reads must not lie where the same run deletes or writes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import (
    PPO,
    ClipReward,
    DataSpec,
    HFModel,
    HFTokenizer,
    Lora,
    ModelReward,
    RewardSpec,
    RunSpec,
    StoredData,
)
from areno_fn.engine.cast import teacher_roles
from areno_fn.engine.outputs import OWN, written


def require_apart(spec: RunSpec, *, overwrite: bool) -> None:
    """Refuses a source that `--overwrite` would delete, or that the run itself would write over.

    Links are followed: those in the path of a source, and those inside its folder, as in a cache of weights.

    Args:
        spec: what is asked for; its `out` is the output folder.
        overwrite: a run in the output folder is deleted first.

    Raises:
        SpecError: one line for each such source, with its field.
    """
    names = OWN if overwrite else written(spec)
    problems = [
        f"{field}: {path} lies in {Path(spec.out) / name}, which {_fate(overwrite)}; move it elsewhere, or choose another out"
        for field, path in _sources(spec)
        if (name := _within(path, spec.out, names)) is not None
    ]
    if problems:
        raise SpecError("\n".join(dict.fromkeys(problems)))


def _fate(overwrite: bool) -> str:
    return "--overwrite deletes" if overwrite else "this run writes itself"


def _sources(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Every path that a specification reads from, with the field that names it."""
    if isinstance(spec.model, HFModel):
        yield "model.path", spec.model.path
        for name, path in (spec.model.pipeline.parts if spec.model.pipeline else {}).items():
            yield f"model.pipeline.parts.{name}", path
    if isinstance(spec.finetune, Lora) and spec.finetune.adapter:
        yield "finetune.adapter", spec.finetune.adapter
    if isinstance(spec.tokenizer, HFTokenizer):
        yield "tokenizer.path", spec.tokenizer.path
    for phase in spec.phases:
        where = f"phases.{phase.name}"
        yield from _read(where, phase.data, phase.rewards)
        if isinstance(phase.algorithm, PPO) and phase.algorithm.critic.path:
            yield f"{where}.algorithm.critic.path", phase.algorithm.critic.path
    yield from ((where, path) for path, (_, where) in teacher_roles(spec).items())
    if spec.evaluation is not None:
        yield from _read("evaluation", spec.evaluation.data, spec.evaluation.rewards)


def _read(where: str, data: Iterable[DataSpec], rewards: Iterable[RewardSpec]) -> Iterator[tuple[str, str]]:
    for place, source in enumerate(data):
        if isinstance(source, StoredData):
            yield f"{where}.data.{place}.path", source.path
    for place, reward in enumerate(rewards):
        if isinstance(reward, ModelReward | ClipReward):
            yield f"{where}.rewards.{place}.path", reward.path


def _within(source: str, out: str, names: Iterable[str]) -> str | None:
    """The name in the output folder in which a source, or a file that is linked into its folder, lies."""
    if "\0" in source + out:  # no path, which is refused where it is opened
        return None
    root = Path(os.path.realpath(out))
    owned = {root / name: name for name in names}
    above = {parent for path in (Path(source), *_links(source)) for parent in _reached(path)}
    return next((name for path, name in owned.items() if path in above), None)


def _links(source: str) -> list[Path]:
    try:
        with os.scandir(source) as entries:
            return [Path(entry.path) for entry in entries if entry.is_symlink()]
    except OSError:  # a file, or nothing
        return []


def _reached(path: Path) -> Iterator[Path]:
    """Every folder that a path goes through: as it is written, and behind its links."""
    written_out = Path(os.path.abspath(path))
    for part in (written_out, *written_out.parents):
        yield Path(os.path.realpath(part.parent)) / part.name
    real = Path(os.path.realpath(path))
    yield from (real, *real.parents)
