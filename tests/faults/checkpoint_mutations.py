"""Damaged and hostile checkpoints, made from whole ones: bytes changed, headers and indexes that say something else,
and things that are no files. All of it follows from the random generator that is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from faults import checkpoint_edits as edits
from faults.checkpoint_folders import OUTSIDE, Folder, Special

from areno_fn.ckpt.store import INDEX, SINGLE


def mutate(random: Random, folder: Folder) -> tuple[Folder, str]:
    """A folder with one to three faults, and what was done to it."""
    done = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        kind = random.choice(_MUTATIONS)
        done.append(f"{kind.__name__}: {kind(random, folder)}")
    return folder, "; ".join(done)


def change_bytes(random: Random, folder: Folder) -> str:
    """Bytes of any file changed, removed, put in, exchanged, or cut off; more often near its beginning."""
    files = {name: content for name, content in folder.items() if isinstance(content, bytes) and content}
    if not files:
        return "nothing"
    name = random.choice(list(files))
    data = bytearray(files[name])
    place = random.randrange(min(len(data), random.choice((8, 9, 200, len(data)))))
    kind = random.choice(list(_BYTES))
    _BYTES[kind](random, data, place)
    folder[name] = bytes(data)
    return f"{kind} at {place} of {name}"


def _flip(random: Random, data: bytearray, place: int) -> None:
    data[place] ^= 1 << random.randrange(8)


def _set(random: Random, data: bytearray, place: int) -> None:
    data[place] = random.choice([*b'\0\xff"{}[],:\\0123456789eE-+.', random.randrange(256)])


def _remove(random: Random, data: bytearray, place: int) -> None:
    del data[place : place + random.randrange(1, 20)]


def _insert(random: Random, data: bytearray, place: int) -> None:
    some = [b"\0", b'"', b"{", b"}", b"[" * 3000, b" " * 300, b"9" * 5000, b"\xed\xa0\x80", random.randbytes(7)]
    data[place:place] = random.choice(some)


def _cut(random: Random, data: bytearray, place: int) -> None:
    del data[place:]


def _extend(random: Random, data: bytearray, place: int) -> None:
    data += random.randbytes(random.choice((1, 8, 100)))


def _swap(random: Random, data: bytearray, place: int) -> None:
    other = random.randrange(len(data))
    data[place], data[other] = data[other], data[place]


def _repeat(random: Random, data: bytearray, place: int) -> None:
    data[place:place] = data[place : place + random.randrange(1, 200)]


_BYTES: dict[str, Callable[[Random, bytearray, int], None]] = {
    "flip": _flip, "set": _set, "remove": _remove, "insert": _insert, "cut": _cut, "extend": _extend, "swap": _swap,
    "repeat": _repeat,
}  # fmt: skip


def change_length(random: Random, folder: Folder) -> str:
    """The length of a header."""
    name, data = _some_weights(random, folder)
    own, size = int.from_bytes(data[:8], "little"), len(data)
    near = [own - 1, own + 1, own + 8, size - 8, size]
    length = random.choice([0, 1, 2, *near, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 10**8, 10**8 + 1])
    if name:
        folder[name] = (length % 2**64).to_bytes(8, "little") + data[8:]
    return f"{length} in {name}"


def change_header(random: Random, folder: Folder) -> str:
    """A header that says something else; at times with fewer bytes behind it, or others."""
    name, whole = _some_weights(random, folder)
    length = int.from_bytes(whole[:8], "little")
    header, data = _json(whole[8 : 8 + length]), whole[8 + length :]
    if not header:
        return "nothing"
    text, told = edits.header(random, header)
    if random.random() < 0.2:
        data = data[: random.randrange(len(data) + 1)] + random.randbytes(random.randrange(9))
    folder[name] = len(text).to_bytes(8, "little") + text + data
    return f"{told} in {name}"


def change_index(random: Random, folder: Folder) -> str:
    """An index that says something else; a single file gets one, and loses its name at times."""
    content = folder.get(INDEX, b'{"metadata": {}, "weight_map": {}}')
    index = _json(content) if isinstance(content, bytes) else None
    if not index or not isinstance(index.get("weight_map"), dict):
        return "nothing"
    folder[INDEX], told = edits.index(random, index, list(folder))
    if SINGLE in folder and random.random() < 0.5:
        folder["part.safetensors"] = folder.pop(SINGLE)
    return told


def repeat_name(random: Random, folder: Folder) -> str:
    """A name that stands twice in an object, with two values; whoever reads it takes the first or the last."""
    name = random.choice([name for name in folder if name.endswith((".json", ".safetensors"))] or [""])
    content = folder.get(name)
    if not isinstance(content, bytes):
        return "nothing"
    start = 8 if name.endswith(".safetensors") else 0
    stop = start + int.from_bytes(content[:8], "little") if start else len(content)
    values = _json(content[start:stop])
    inner = values.get("weight_map", values) if values else None
    if not inner or not isinstance(inner, dict):
        return "nothing"
    repeated, other = random.choice(list(inner)), random.choice(list(inner.values()))
    whole = json.dumps(inner)
    twice = f"{{{json.dumps(repeated)}: {json.dumps(other)}, {whole[1:]}"
    text = json.dumps(values).replace(whole, twice, 1).encode()
    folder[name] = (len(text).to_bytes(8, "little") if start else b"") + text + content[stop:]
    return f"{repeated[:40]!r} in {name}"


def change_folder(random: Random, folder: Folder) -> str:
    """Files removed, exchanged, copied, or replaced by something that is no file."""
    name, other = random.choice(list(folder)), random.choice(list(folder))
    edit = random.choice(("remove", "exchange", "copy", "case", "empty", "moved", *_SPECIAL))
    if edit == "remove":
        del folder[name]
    elif edit == "exchange":
        folder[name], folder[other] = folder[other], folder[name]
    elif edit == "copy":
        folder[random.choice([SINGLE, "extra.safetensors", INDEX, "link.safetensors"])] = folder[name]
    elif edit == "case":
        folder[name.upper()] = folder.pop(name)
    elif edit == "empty":
        folder[name] = b""
    elif edit == "moved":
        folder["moved"] = folder.pop(name)
        folder[name] = Special("link", "moved")
    else:
        folder[name] = Special(edit.split()[0], random.choice([target.format(name) for target in _SPECIAL[edit]]))
    folder.setdefault("config.json", b"{}")
    return f"{edit} {name}"


_SPECIAL = {
    "link out": (f"../{OUTSIDE}", "/etc/passwd", "/dev/zero", "/proc/self/mem", "/"),
    "link to itself": ("{}",),
    "pipe": ("",),
    "socket": ("",),
    "folder": ("",),
    # holes of a terabyte behind these bytes: headers of no bytes, of 16, of 100 MB, and beyond
    "sparse": ("00", "00e1f50500000000", "00e1f505000000007b", "10000000000000007b7d", "00000000000000ff7b"),
}
Mutation = Callable[[Random, Folder], str]
_MUTATIONS: list[Mutation] = [
    change_bytes,
    change_length,
    change_header,
    change_header,
    change_index,
    repeat_name,
    change_folder,
]


def _some_weights(random: Random, folder: Folder) -> tuple[str, bytes]:
    files = {n: data for n, data in folder.items() if n.endswith(".safetensors") and isinstance(data, bytes)}
    return random.choice(list(files.items())) if files else ("", b"")


def _json(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
