"""The law of checkpoints: through real files, saving undoes loading and loading undoes saving, bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from areno_fn.ckpt.folder import HFFolder, open_folder
from areno_fn.ckpt.load import load
from areno_fn.ckpt.save import save
from areno_fn.contracts.key import Key
from areno_fn.contracts.layout import Iso, Tensors, TensorSpec, spec_of
from areno_fn.contracts.placement import Placement
from areno_fn.testing.elements import member, plain, random_bits, refusals, require_same
from areno_fn.testing.layouts import RANKS, dealt
from areno_fn.testing.plain_files import INDEX, STORABLE, PlainFolder, read_folder, size, write_folder
from areno_fn.testing.sizes import require_some

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn)
_CONFIG = {"model_type": "made-up", "dtype": "bfloat16"}
_METADATA = {"format": "pt", "made_by": "a law"}
_INDEX_METADATA = {"note": "kept"}


def state_dict(
    layout: Iso, *, dtypes: Sequence[torch.dtype] = DTYPES, key: Key | None = None
) -> dict[str, torch.Tensor]:
    """Random bits for what a file of this layout holds; tied tensors are equal.

    Args:
        layout: from the tensors of the file to the leaves.
        dtypes: one is drawn for the tensors of each part that declares none, since joined tensors must agree.
        key: names the draws.

    Raises:
        ValueError: there is no dtype.
    """
    require_some(len(dtypes), "dtypes name none", "give one at least")
    key = key or Key.of(0)
    chosen = random_bits({str(number): TensorSpec((1,), torch.uint8) for number in range(len(layout.parts))}, key)
    specs: dict[str, TensorSpec] = {}
    for number, part in enumerate(layout.parts):
        dtype = dtypes[int(chosen[str(number)]) % len(dtypes)]
        specs |= {name: TensorSpec(spec.shape, spec.dtype or dtype) for name, spec in part.source.items()}
    (state,) = member(layout, random_bits({name: specs[name] for name in layout.source}, key.fold("bits")))
    return state


def checkpoint_roundtrip(
    layout: Iso,
    *,
    state: Tensors | None = None,
    placements: Mapping[str, Placement] | None = None,
    ranks: Sequence[int] = RANKS,
    left_out: Collection[str] = (),
    dtypes: Sequence[torch.dtype] = DTYPES,
    folder: str | Path | None = None,
    key: Key | None = None,
) -> tuple[int, ...]:
    """A folder that is loaded and saved is the same folder, and leaves that are saved and loaded are the same leaves.

    Folders of one file and of several are written here, in the plainest way, and what is saved is read back the
    same way. Compared are names, shapes, dtypes, bytes and metadata; the files must hold nothing else, and
    `total_size` must be exact. With placements, the leaves are loaded as every number of ranks holds them,
    and saved from there.

    Args:
        layout: from the tensors of the file to the leaves.
        state: what a file holds; `state_dict(layout)` when None. Give what a true file holds, to see that the
            layout claims all of it.
        placements: how the leaves are dealt to ranks.
        ranks: the numbers of ranks to try; those to which the leaves cannot be dealt are left out.
        left_out: patterns of tensors of `state` that the layout does not take; they must still be in what is saved.
        dtypes: as of `state_dict`.
        folder: where the folders are made; a temporary folder, removed afterwards, when None.
        key: names the draws.

    Returns:
        The numbers of ranks that were tried; none without placements.

    Raises:
        AssertionError: says what is not the same, or what was refused.
        ValueError: there is no dtype.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            return checkpoint_roundtrip(
                layout,
                state=state,
                placements=placements,
                ranks=ranks,
                left_out=left_out,
                dtypes=dtypes,
                folder=made,
                key=key,
            )
    given = dict(state) if state is not None else state_dict(layout, dtypes=dtypes, key=key)
    _require_storable(given)
    placed = {} if placements is None else _dealt(layout, placements, ranks)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for files in (1, 3):
            source = write_folder(
                Path(scratch) / f"of{files}", given, _CONFIG, files=files, metadata=_METADATA, index=_INDEX_METADATA
            )
            _file_to_file(source, layout, given, left_out, f"{files} file{'s' * (files > 1)}")
        for count, each in placed.items():
            _file_to_file(source, each, given, left_out, f"{count} rank{'s' * (count > 1)}")
        _leaves_to_leaves(Path(scratch) / "leaves", layout, {name: given[name] for name in layout.source})
    return tuple(placed)


def _require_storable(given: Tensors) -> None:
    if not given:
        raise AssertionError("there is no tensor that a file could hold")
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise AssertionError(f"{name!r} is a {type(tensor).__name__}, it should be a tensor")
        if not tensor.is_cpu or tensor.dtype not in STORABLE:
            raise AssertionError(f"{name!r} is {spec_of(tensor)} on {tensor.device}, which no file is made of here")


def _dealt(layout: Iso, placements: Mapping[str, Placement], ranks: Sequence[int]) -> dict[int, Iso]:
    placed = {count: dealt(layout.target, placements, count) for count in ranks}
    return {count: layout >> iso for count, iso in placed.items() if iso is not None}


def _file_to_file(source: Path, layout: Iso, given: Tensors, left_out: Collection[str], where: str) -> None:
    with refusals(f"{where}: a file that holds {len(given)} tensors is not loaded"):
        opened = open_folder(source)
        leaves = load(opened, layout, left_out=left_out)
    with refusals(f"{where}: the layout does not take the tensors of the file"):
        expected = layout({name: given[name] for name in layout.source})
    require_same(leaves, expected, f"{where}: the leaves that are loaded are not those that the layout makes")
    out = source.with_name("saved")
    with refusals(f"{where}: what was loaded is not saved"):
        save(
            out,
            leaves,
            layout,
            opened.config,
            source=opened,
            left_out=left_out,
            shard_bytes=_shard_bytes(opened, given),
        )
    saved = read_folder(out)
    require_same(saved.tensors, given, f"{where}: loaded and saved")
    _require_metadata(saved, len(opened.store.files) > 1, where)
    _remove(out)


def _shard_bytes(opened: HFFolder, given: Tensors) -> int:
    total = size(given)
    return max(1, total // 3) if len(opened.store.files) > 1 else total + 1


def _require_metadata(saved: PlainFolder, several: bool, where: str) -> None:
    for name, metadata in saved.metadata.items():
        if dict(metadata) != _METADATA:
            raise AssertionError(
                f"{where}: the metadata of {name} is {dict(metadata)}, in the source it was {_METADATA}"
            )
    if several and len(saved.metadata) > 1:
        index = {} if saved.index is None else dict(saved.index["metadata"])
        index.pop("total_size", None)
        if index != _INDEX_METADATA:
            raise AssertionError(f"{where}: the metadata of {INDEX} is {index}, in the source it was {_INDEX_METADATA}")


def _leaves_to_leaves(out: Path, layout: Iso, given: Tensors) -> None:
    with refusals("leaves that the layout makes are not saved and loaded"):
        leaves = {name: plain(tensor).clone() for name, tensor in layout(dict(given)).items()}
        save(out, leaves, layout, _CONFIG)
        again = load(open_folder(out), layout)
    require_same(again, leaves, "saved and loaded")
    require_same(read_folder(out).tensors, given, "the file that leaves are saved to")


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
