"""Reading and writing specifications, with every refusal that needs nothing but the specification itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import NODEFAULT

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import RunSpec
from areno_fn.engine.specfile import overrides as set_option
from areno_fn.engine.specfile.formats import decode, encode, format_of, kind_of, require_plain
from areno_fn.engine.specfile.sentences import explain, wrong_version
from areno_fn.engine.specfile.types import Path as Place
from areno_fn.engine.specfile.types import Type, child, default, locate, plain_copy, root
from areno_fn.engine.specfile.upgrade import READABLE, rewritten, upgraded, version_of


def read(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), told: Callable[[str], None] | None = None
) -> RunSpec:
    """Reads a specification of this or an older version and applies `--set` overrides to it.

    Args:
        path: a `.toml`, `.yaml`, `.yml`, `.json` or `.msgpack` file.
        overrides: texts `address=value`, applied in order, in the words of this version or of the file's.
        told: hears, in a sentence, of settings that an override of a kind drops because that kind has none of the name.

    Raises:
        SpecError: the file cannot be read, or does not hold a valid specification; one sentence that begins with the
            file's name, or with the override that is at fault.
    """
    if isinstance(overrides, str):
        raise SpecError(f"overrides come in a list, [{overrides!r}], received the text {overrides!r}")
    if not isinstance(path, str | os.PathLike):
        raise SpecError(f"a specification is read from the path of a file, received {kind_of(path)}")
    source = Path(path)
    suffix = format_of(source)
    written = _read(source)
    raw = upgraded(written)
    places = []
    for override in overrides:
        _spell_out(raw)
        change = set_option.apply(raw, override)
        places.append((change.path, f"--set {override}"))
        if told is not None and change.dropped:
            told(f"--set {override}: {_dropped(raw, change)}")
        raw = rewritten(raw, version_of(written))
    return _convert(raw, str(source), suffix, places)


def _dropped(raw: dict[str, Any], change: set_option.Change) -> str:
    names = ", ".join(".".join(map(str, place)) for place in change.dropped)
    where, table, _ = locate(raw, change.path[:-1])
    return f"{where} is without {names} now, which its kind {table['kind']!r} has not"


def check(spec: RunSpec) -> RunSpec:
    """Checks a specification that was built in Python: struct constructors do not check their arguments.

    Returns:
        An equal specification whose every value has the declared type and range.

    Raises:
        SpecError: names the first field that is wrong.
    """
    require_spec(spec)
    return _convert(_builtins(spec), "the specification", "", [])


def require_spec(spec: object) -> None:
    """Refuses what is no specification.

    Raises:
        SpecError: says what reads one.
    """
    if isinstance(spec, str | os.PathLike):
        raise SpecError(
            f"a run takes a RunSpec, received {os.fspath(spec)!r}; read_spec({os.fspath(spec)!r}) reads one"
        )
    if not isinstance(spec, RunSpec):
        raise SpecError(f"a run takes a RunSpec, as read_spec reads one, received {kind_of(spec)}")


def text(spec: RunSpec, suffix: str = ".toml") -> str:
    """A specification in a text format, every field written out.

    Raises:
        SpecError: it is not valid, or TOML cannot say it.
    """
    return _encoded(_builtins(check(spec)), suffix, "the specification").decode()


def write(spec: RunSpec, path: str | os.PathLike[str]) -> None:
    """Writes a specification in the format of the file's suffix; `read` returns an equal one.

    Raises:
        SpecError: the specification is not valid, TOML cannot say it, or the file cannot be written.
    """
    target = Path(path)
    _save(_encoded(_builtins(check(spec)), format_of(target), str(target)), target)


def upgrade(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Writes what a specification of an older version says in the version of this release, and nothing that it leaves out.

    Raises:
        SpecError: as `read` for the one file, as `write` for the other.
    """
    read(source)
    path = Path(target)
    _save(_encoded(upgraded(_read(Path(source))), format_of(path), str(path)), path)


def first_difference(left: RunSpec, right: RunSpec) -> str | None:
    """Where two specifications differ first, as `path: a and b`; None when they are equal."""
    if left == right:
        return None
    one, other = plain_copy(left), plain_copy(right)
    path = _difference(one, other)
    (where, mine, _), (_, theirs, _) = locate(one, path), locate(other, path)
    return f"{where}: {kind_of(mine)} and {kind_of(theirs)}"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SpecError(
            f"{path}: no such file; `python -m areno_fn.spec new FILE.toml` writes one to start from"
        ) from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {_reason(error)}") from None


def _save(data: bytes, path: Path) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise SpecError(f"{path}: cannot be written: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    reason = error.strerror or str(error)
    return reason[:1].lower() + reason[1:]


def _read(source: Path) -> dict[str, Any]:
    """What a file holds, in a version that this release knows."""
    raw = decode(_bytes(source), source)
    version = version_of(raw)
    if type(version) is not int or version not in READABLE:
        raise SpecError(f"{source}: {wrong_version(version, READABLE)}")
    return raw


def _convert(raw: dict[str, Any], where: str, suffix: str, places: list[tuple[Place, str]]) -> RunSpec:
    _spell_out(raw)
    try:
        return msgspec.convert(raw, RunSpec)
    except msgspec.ValidationError as error:
        place, sentence = explain(str(error), raw, suffix)
        raise SpecError(f"{_blame(where, place, places)}: {sentence}") from None


def _spell_out(raw: dict[str, Any]) -> None:
    """Puts a table where its kind alone may stand: `finetune = "lora"`."""
    if isinstance(raw.get("finetune"), str):
        raw["finetune"] = {"kind": raw["finetune"]}


def _blame(where: str, place: Place, places: list[tuple[Place, str]]) -> str:
    """The override that set the faulty place, the file with the override that set a part of it, or the file."""
    at = [override for path, override in places if place[: len(path)] == path]
    inside = [override for path, override in places if place and path[: len(place)] == place]
    return at[-1] if at else f"{where} with {inside[-1]}" if inside else where


def _builtins(spec: RunSpec) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = plain_copy(spec)
    except RecursionError:
        raise SpecError("the specification: a table in model.config contains itself, which no file can say") from None
    require_plain(raw, "the specification")
    return raw


def _encoded(plain: dict[str, Any], suffix: str, where: str) -> bytes:
    if suffix == ".toml":
        _drop_absent(plain, root())
        nowhere = _absent(plain, "")
        if nowhere:
            raise SpecError(
                f"{where}: {nowhere} is null, which TOML cannot say; leave the key out, or write .yaml or .msgpack"
            )
    return encode(plain, suffix)


def _drop_absent(plain: Any, info: Type) -> None:
    """Leaves out the fields that are None where None is what leaving out means."""
    if isinstance(plain, dict):
        for name in [name for name, value in plain.items() if value is None and default(info, plain, name) is None]:
            del plain[name]
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, item in items:
        _drop_absent(item, child(info, plain, key))


def _absent(value: Any, place: str) -> str | None:
    if value is None:
        return place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = (_absent(item, f"{place}.{key}" if place else str(key)) for key, item in items)
    return next((path for path in found if path), None)


def _difference(left: Any, right: Any) -> Place:
    """The keys and indices that lead to the first difference."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *(key for key in right if key not in left)]:
            if left.get(key, NODEFAULT) != right.get(key, NODEFAULT):
                return (key, *_difference(left.get(key), right.get(key)))
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            if one != other:
                return (index, *_difference(one, other))
    return ()
