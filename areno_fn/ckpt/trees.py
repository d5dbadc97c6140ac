"""Any tree of tensors, numbers and strings as one safetensors file, and back.

Tensors stand in the file under their dotted paths, everything else in its metadata. Tensors that are the same
one in memory are stored once and are the same one again when they are read.
"""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import msgspec
import torch

from areno_fn.ckpt import atomic
from areno_fn.ckpt.header import Header, read_header, strict_json
from areno_fn.ckpt.tensorfile import Reader, write_tensors
from areno_fn.ckpt.words import encoded
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import TensorSpec, spec_of
from areno_fn.contracts.record import field_names, is_record, static_names

T = TypeVar("T")

Scalar = int | float | bool | str | None
_SCALARS = (int, float, bool, str, type(None))
_KEY = "areno_fn.tree"

VERSION = 1
_MOST_SHOWN = 20


class Values(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is in a tree beside tensors.

    Attributes:
        version: of this description.
        scalars: numbers, strings and absent fields, by path.
        aliases: paths of tensors that are stored under another path.
    """

    version: int = VERSION
    scalars: dict[str, Scalar] = {}
    aliases: dict[str, str] = {}


@attrs.frozen
class Flat:
    """A tree taken apart: each tensor once, and the rest."""

    tensors: Mapping[str, torch.Tensor]
    values: Values


def flatten(tree: Any) -> Flat:
    """Takes a tree apart.

    Raises:
        CheckpointError: a leaf or a path that cannot be stored, or two leaves with one path.
    """
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Scalar] = {}
    aliases: dict[str, str] = {}
    owners: dict[Any, str] = {}
    for path, leaf, _ in walk(tree):
        if path in scalars or path in tensors or path in aliases:
            raise CheckpointError(f"two leaves of the tree have the path {path!r}; rename a key")
        encoded(path, "the path of a leaf")
        if not isinstance(leaf, torch.Tensor):
            scalars[path] = _storable(path, leaf)
        elif leaf.layout is not torch.strided:
            raise CheckpointError(f"{path!r} is a {leaf.layout} tensor, only dense ones can be stored")
        elif (owner := owners.setdefault(_identity(leaf), path)) != path:
            aliases[path] = owner
        else:
            tensors[path] = leaf
    return Flat(tensors, Values(scalars=scalars, aliases=aliases))


def walk(tree: Any, path: str = "", static: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Every leaf with its path and whether it is a static field; `None` is a leaf here."""
    inside = branches(tree)
    if inside is None:
        yield path, tree, static
        return
    fixed = static_names(tree) if is_record(tree) else ()
    for name, child in inside:
        yield from walk(child, _joined(path, name), static or name in fixed)


def save_tree(path: str | Path, tree: Any, metadata: Mapping[str, str] | None = None) -> Path:
    """Writes a tree to one file, which appears whole or not at all.

    Args:
        path: the file; one that is there is replaced.
        tree: records, dicts, lists and tuples of tensors, ints, floats, bools, strings and None.
        metadata: further strings for the header.

    Raises:
        CheckpointError: a leaf that cannot be stored, or the disk refuses.
    """
    flat = flatten(tree)
    specs = {name: spec_of(tensor) for name, tensor in flat.tensors.items()}
    described = json.dumps(msgspec.to_builtins(flat.values), separators=(",", ":"))
    with atomic.file(Path(path)) as scratch:
        write_tensors(scratch, specs, flat.tensors.__getitem__, {**(metadata or {}), "format": "pt", _KEY: described})
    return Path(path)


def load_tree(path: str | Path, like: T, device: torch.device | str = "cpu") -> T:
    """Reads a tree of the structure of `like`.

    Args:
        path: what `save_tree` wrote.
        like: a tree whose tensors give shapes, dtypes and devices (they may be meta tensors), and whose other
            leaves give types; static fields must have the stored values.
        device: for tensors that are meta tensors in `like`.

    Raises:
        CheckpointError: the file is missing, damaged, or does not hold such a tree; names every difference.
    """
    header, values = _described(Path(path))
    specs = {name: entry.spec for name, entry in header.entries.items()}
    aliased = {name: specs[owner] for name, owner in values.aliases.items()}
    require_none(str(path), differences(specs | aliased, values, like))
    with Reader() as reader:
        tensors = {name: reader.read(header, name) for name in header.entries}
    return rebuild(like, tensors, values, device)


def load_record(path: str | Path, kind: type[T], device: torch.device | str = "cpu") -> T:
    """Reads a record without a tree to compare with; its class says what to expect and checks it.

    Args:
        path: what `save_tree` wrote.
        kind: a record class whose fields are tensors, scalars, other such records, or None.
        device: where the tensors will be.

    Raises:
        CheckpointError: the file is missing, damaged, or holds something else.
        RecordError: the values break the record's contract.
    """
    header, values = _described(Path(path))
    with Reader() as reader:
        tensors = {name: reader.read(header, name).to(device) for name in header.entries}
    leaves = {**tensors, **values.scalars, **{name: tensors[owner] for name, owner in values.aliases.items()}}
    made = _record(str(path), kind, "", leaves)
    if leaves:
        raise CheckpointError(f"{path} holds {next(iter(leaves))!r}, which {kind.__name__} has not")
    return made


def _require_consistent(where: str, header: Header, values: Values) -> None:
    """Refuses a description of another version, or one that does not go with the tensors of the file.

    Raises:
        CheckpointError: says which.
    """
    if values.version != VERSION:
        raise CheckpointError(f"{where} has version {values.version}, this library reads version {VERSION}")
    for path, owner in values.aliases.items():
        if owner not in header.entries:
            raise CheckpointError(f"{where}: {path!r} is stored as {owner!r}, which is not there")
    paths = [*header.entries, *values.aliases, *values.scalars]
    for path in {path for path in paths if paths.count(path) > 1} if len(set(paths)) < len(paths) else ():
        raise CheckpointError(f"{where} holds {path!r} twice")


def differences(stored: Mapping[str, TensorSpec], values: Values, like: Any) -> list[str]:
    """In what a stored tree is not of the structure of `like`, each leaf in words; no tensor is read.

    Args:
        stored: shape and dtype of every tensor by path, aliases included.
        values: everything else that is stored.
        like: the tree that is expected.
    """
    found, wanted, leaves = [], set(), {**stored, **values.scalars}
    for path, leaf, static in walk(like):
        wanted.add(path)
        if path not in leaves:
            found.append(f"{path!r} is missing, it should be {_shown(leaf)}")
        elif not _alike(leaves[path], leaf, static):
            found.append(f"{path!r} is {_shown(leaves[path])}, it should be {_shown(leaf, static)}")
    return found + [f"{path!r} is not expected" for path in leaves if path not in wanted]


def require_none(where: str, found: Sequence[str]) -> None:
    """Refuses a stored tree that differs from what is expected.

    Raises:
        CheckpointError: names every difference, up to a limit.
    """
    if found:
        more = [f"and {len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else []
        raise CheckpointError(f"{where} does not hold what is expected: {'; '.join([*found[:_MOST_SHOWN], *more])}")


def rebuild(like: T, tensors: Mapping[str, torch.Tensor], values: Values, device: torch.device | str) -> T:
    """Puts a tree of the structure of `like` together; one that `require_like` accepts."""
    moved: dict[Any, torch.Tensor] = {}

    def leaf(path: str, old: Any) -> Any:
        if not isinstance(old, torch.Tensor):
            return values.scalars[path]
        owner = values.aliases.get(path, path)
        target = torch.device(device) if old.is_meta else old.device
        return moved.setdefault((owner, target), tensors[owner].to(target))

    return _mapped(like, leaf, "")


def _described(path: Path) -> tuple[Header, Values]:
    header = read_header(path)
    if _KEY not in header.metadata:
        raise CheckpointError(f"{path} is not a stored tree: its header has no {_KEY!r}")
    described = strict_json(header.metadata[_KEY].encode(), f"{_KEY!r} in the header of {path}")
    try:
        values = msgspec.convert(described, Values)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{_KEY!r} in the header of {path} is damaged: {error}") from None
    _require_consistent(str(path), header, values)
    return header, values


def branches(node: Any) -> list[tuple[str, Any]] | None:
    """The names and values inside a container; None for a leaf."""
    if is_record(node):
        return [(name, getattr(node, name)) for name in field_names(node)]
    if isinstance(node, dict):
        return [(str(key), child) for key, child in node.items()]
    if isinstance(node, list | tuple):
        return [(str(place), child) for place, child in enumerate(node)]
    return None


def _mapped(node: Any, function: Callable[[str, Any], Any], path: str) -> Any:
    inside = branches(node)
    if inside is None:
        return function(path, node)
    made = [_mapped(child, function, _joined(path, name)) for name, child in inside]
    if is_record(node):
        return type(node)(**dict(zip(field_names(node), made, strict=True)))
    if isinstance(node, dict):
        return dict(zip(node, made, strict=True))
    return type(node)(*made) if hasattr(node, "_fields") else type(node)(made)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _record(where: str, kind: Any, path: str, leaves: dict[str, Any]) -> Any:
    """Builds a record of class `kind`, taking what it uses out of `leaves`."""
    made = {}
    for name, inner in record_fields(kind).items():
        place = _joined(path, name)
        if place in leaves:
            made[name] = leaves.pop(place)
        elif inner is not None:
            made[name] = _record(where, inner, place, leaves)
        else:
            raise CheckpointError(f"{where} has no {place!r}, which {kind.__name__} needs")
    return kind(**made)


def record_fields(kind: Any) -> dict[str, Any]:
    """The fields of a record class, with the class of those that are records themselves and None for others."""
    hints = typing.get_type_hints(kind, vars(sys.modules[kind.__module__]))
    inner = {name: [t for t in (hints[name], *typing.get_args(hints[name])) if _is_record_class(t)] for name in hints}
    return {field.name: next(iter(inner[field.name]), None) for field in attrs.fields(kind)}


def _is_record_class(kind: Any) -> bool:
    return isinstance(kind, type) and getattr(kind, "__areno_record__", False)


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for two tensors exactly when they are the same elements of the same memory."""
    if not tensor.numel():
        return id(tensor)
    place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return place, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _storable(path: str, leaf: Any) -> Scalar:
    if type(leaf) not in _SCALARS:
        raise CheckpointError(
            f"{path!r} is a {type(leaf).__name__}; only tensors, ints, floats, bools, strings and None can be stored"
        )
    if type(leaf) is int and not -(1 << 63) <= leaf < 1 << 63:
        raise CheckpointError(f"{path!r} is {leaf}, which does not fit in 64 bits")
    if isinstance(leaf, str):
        encoded(leaf, repr(path))
    return leaf


def _alike(stored: Any, leaf: Any, static: bool) -> bool:
    if isinstance(leaf, torch.Tensor):
        return isinstance(stored, TensorSpec) and stored.admits(leaf)
    return type(stored) is type(leaf) and (not static or stored == leaf)


def _shown(value: Any, static: bool = False) -> str:
    if isinstance(value, torch.Tensor):
        return str(spec_of(value))
    if isinstance(value, TensorSpec):
        return str(value)
    return f"{value!r}" if static or value is None else f"the {type(value).__name__} {value!r}"
