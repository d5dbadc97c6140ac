"""Bytes to plain data and back, for each file format, as strictly as the format allows.

Plain data is dicts with text keys, lists, text, booleans, 64-bit integers, finite numbers and None: what all four
formats can say (TOML has no None). Duplicate keys are refused wherever the parser shows them.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from areno_fn.contracts.errors import SpecError
from areno_fn.engine.specfile.types import Path as Place
from areno_fn.engine.specfile.types import locate
from areno_fn.engine.specfile.yaml_text import YamlError, dump_yaml, load_yaml

SUFFIXES = (".toml", ".yaml", ".yml", ".json", ".msgpack")


def format_of(path: Path) -> str:
    """The suffix of a specification file, in lower case.

    Raises:
        SpecError: the suffix names no known format.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise SpecError(f"{path}: a specification file must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    return suffix


def decode(data: bytes, path: Path) -> dict[str, Any]:
    """The mapping that a file's bytes hold.

    Raises:
        SpecError: the bytes are empty, broken, not a mapping, or hold something that is not plain data.
    """
    suffix = format_of(path)
    try:
        raw = _parse(data, suffix)
    except RecursionError:
        raise SpecError(f"{path}: the file is nested too deeply to be a specification") from None
    except _Broken as error:
        raise SpecError(f"{path}: not valid {_TITLES[suffix]}: {error}") from None
    if raw is None or raw == {}:
        raise SpecError(f"{path}: the file is empty; `python -m areno_fn.spec new FILE.toml` writes one to start from")
    if not isinstance(raw, dict):
        raise SpecError(f"{path}: a specification must be a table at the top, this file holds {kind_of(raw)}")
    require_plain(raw, str(path))
    return raw


def encode(plain: dict[str, Any], suffix: str) -> bytes:
    """The bytes of plain data in a format; TOML must hold no None."""
    if suffix == ".msgpack":
        return msgspec.msgpack.encode(plain, order="deterministic")
    if suffix == ".json":
        return msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n"
    if suffix == ".toml":
        return tomli_w.dumps(plain).encode()
    return dump_yaml(plain).encode()


def require_plain(value: Any, where: str) -> None:
    """Refuses what is not plain data.

    Raises:
        SpecError: names the place, as `--set` takes it, and what stands there.
    """
    for path, wrong in _wrongs(value, (), ()):
        right = "a specification holds text, finite numbers, booleans, lists and tables with text keys"
        raise SpecError(f"{where}: {locate(value, path)[0] or 'the top'} holds {wrong}; {right}")


def _wrongs(value: Any, path: Place, above: tuple[int, ...]) -> Iterator[tuple[Place, str]]:
    """Everything in a value that is not plain, with its place."""
    wrong = "a table that contains itself" if id(value) in above else _not_plain(value)
    if wrong is not None:
        yield path, wrong
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _wrongs(item, (*path, key), (*above, id(value)))


def kind_of(value: Any) -> str:
    """What a value is, as a person would say it."""
    if value is None:
        return "nothing"
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is str:
        return f"the text {value!r}" if len(value) <= 60 else f"the text {value[:57] + '...'!r}"
    if type(value) in (int, float):
        return f"the number {value!r}"
    if type(value) in (list, tuple):
        return f"a list of {len(value)}"
    return "a table" if type(value) is dict else f"a {type(value).__name__}"


_TITLES = {".toml": "TOML", ".yaml": "YAML", ".yml": "YAML", ".json": "JSON", ".msgpack": "MessagePack"}


class _Broken(Exception):
    """What is wrong with the text, and where."""


def _parse(data: bytes, suffix: str) -> Any:
    if not data:
        return None
    try:
        if suffix == ".msgpack":
            return msgspec.msgpack.decode(data)
        text = data.decode("utf-8-sig")
        if not text.strip():
            return None
        if suffix == ".toml":
            return tomllib.loads(text)
        return _json(text) if suffix == ".json" else load_yaml(text)
    except UnicodeDecodeError as error:
        raise _Broken(f"byte {error.start} is not UTF-8 text") from None
    except msgspec.DecodeError as error:
        raise _Broken(_lower(str(error).removeprefix("MessagePack data is malformed: "))) from None
    except tomllib.TOMLDecodeError as error:
        raise _Broken(_lower(" ".join(str(error).split()))) from None
    except json.JSONDecodeError as error:
        raise _Broken(f"{_lower(error.msg)} (at line {error.lineno}, column {error.colno})") from None
    except YamlError as error:
        raise _Broken(str(error)) from None


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in names if names.count(key) > 1)
            raise _Broken(f"the key {twice!r} appears twice in one table")
        return found

    def constant(name: str) -> Any:
        raise _Broken(f"{name} is not a JSON number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # an integer of more digits than Python converts
        raise _Broken(_lower(str(error).split(";")[0])) from None


def _not_plain(value: Any) -> str | None:
    """What is wrong with a value itself, whatever it contains; subclasses such as numpy's numbers are not plain."""
    sort = type(value)
    if sort is str:
        return None if _encodable(value) else "text with a lone surrogate"
    if sort is int:
        return None if -(2**63) <= value < 2**63 else "a whole number that does not fit 64 bits"
    if sort is float:
        return None if math.isfinite(value) else f"the number {value}"
    if sort is dict:
        odd = [key for key in value if type(key) is not str or not _encodable(key)]
        return f"the key {odd[0]!r}, which is not text" if odd else None
    return None if value is None or sort in (bool, list) else kind_of(value)


def _encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
