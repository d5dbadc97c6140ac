"""Damaged and hostile checkpoints, made from whole ones: bytes changed, headers and indexes that say something else,
and things that are no files. All of it follows from the random generator that is given."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import attrs
import safetensors.torch
import torch

from areno_fn.ckpt.store import INDEX, SINGLE
from areno_fn.models.decoder import DecoderConfig
from areno_fn.models.llama import checkpoint, model

CONFIG = DecoderConfig(
    vocab_size=7, hidden_size=4, intermediate_size=6, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4
)
LAYOUT = checkpoint.layout(CONFIG, head_in_file=True)
OUTSIDE = "outside.safetensors"
"""A valid file beside the folder, with every tensor of the model: what is read from it has left the folder."""


@attrs.frozen
class Special:
    """Something in a folder that is not a regular file of given bytes."""

    kind: str
    target: str = ""


Content = bytes | Special
Folder = dict[str, Content]


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in LAYOUT.source.items()}


def whole(shards: int) -> Folder:
    """A checkpoint without a fault, in one file or several."""
    made = tensors(0)
    config = json.dumps(model.config_to_hf(CONFIG)).encode()
    if shards == 1:
        return {"config.json": config, SINGLE: safetensors.torch.save(made, metadata={"format": "pt"})}
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {tensor: names[i % shards] for i, tensor in enumerate(made)}
    files = {
        name: safetensors.torch.save({t: made[t] for t, file in weight_map.items() if file == name}) for name in names
    }
    index = {"metadata": {"total_size": sum(t.nbytes for t in made.values())}, "weight_map": weight_map}
    return {"config.json": config, INDEX: json.dumps(index).encode(), **files}


def write(root: Path, folder: Folder) -> Path:
    """Puts a folder on the disk as `root/model`, with a file beside it that must not be read."""
    (root / OUTSIDE).write_bytes(safetensors.torch.save(tensors(1)))
    path = root / "model"
    path.mkdir()
    for name, content in folder.items():
        place = path / name
        if isinstance(content, bytes):
            place.write_bytes(content)
        elif content.kind == "link":
            place.symlink_to(content.target)
        elif content.kind == "pipe":
            os.mkfifo(place)
        elif content.kind == "socket":
            with socket.socket(socket.AF_UNIX) as opened:
                opened.bind(str(place))
        elif content.kind == "folder":
            place.mkdir()
        elif content.kind == "sparse":
            with place.open("wb") as file:
                file.write(bytes.fromhex(content.target))
                file.truncate(1 << 40)
    return path


def mutate(random: Random, folder: Folder) -> tuple[Folder, str]:
    """A folder with one to three faults, and what was done to it."""
    done = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        kind = random.choice(_MUTATIONS)
        done.append(f"{kind.__name__}: {kind(random, folder)}")
    return folder, "; ".join(done)


# ------------------------------------------------------------------------------------------------- numbers, values


_NUMBERS = (
    0, 1, -1, 2, 7, 24, 2**31, 2**32 + 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**300, True, False, 1.0, -0.0, 1e400,
    float("nan"), float("inf"), None, "4", [], {},
)  # fmt: skip
_SHAPES = (
    [], [0], [2**32, 2**32], [2**62, 0, 2**62], [1] * 65, [0, *[2**62] * 63], [4.0, 7], "47", None, [[4], 7], {"0": 4},
    [True, 7], [10**30], [-4, -7], [7, 4], [4, 7], [28],
)  # fmt: skip
_NAMES = (
    "", "\0", "\ud83d", "__metadata__", "a" * 5000, "model.layers.0", "../x", "\n", "norm.weight ", "größe", "__proto__",
)  # fmt: skip
_FILE_NAMES = (
    "no.safetensors", f"../{OUTSIDE}", "/etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", "..", ".", "", "/",
    "\ud800.safetensors", "a" * 300 + ".safetensors", "x/" * 3000 + "a.safetensors", "~/x.safetensors",
    "C:\\x.safetensors", f"..\\{OUTSIDE}", f"%2e%2e/{OUTSIDE}", "link.safetensors", "a\nb.safetensors",
    "model\u202e.safetensors", "file:///etc/passwd",
)  # fmt: skip


def _number(random: Random) -> Any:
    return random.choice([*_NUMBERS, random.randrange(200)])


def _shape(random: Random) -> Any:
    return random.choice([*_SHAPES, [_number(random)], [_number(random), _number(random)]])


def _value(random: Random) -> Any:
    nested: Any = []
    for _ in range(random.choice((1, 5, 300))):
        nested = [nested]
    return random.choice([_number(random), _shape(random), "\ud800", "\0", "a" * 70_000, "\n", nested])


def _name(random: Random, names: list[str]) -> str:
    return random.choice([*names, *_NAMES])


def _file_name(random: Random, folder: Folder) -> str:
    own = list(folder)
    first = random.choice(own)
    turned = (first.upper(), f"./{first}", f"{first}/", f" {first}", f"{first} ", f"{first}\0", f"x/../{first}")
    return random.choice([*own, *turned, f"../model/{first}", *_FILE_NAMES])


# ------------------------------------------------------------------------------------------------------- the files


def _weights(folder: Folder) -> list[str]:
    return [name for name, content in folder.items() if name.endswith(".safetensors") and isinstance(content, bytes)]


def _split(data: bytes) -> tuple[dict[str, Any] | None, bytes]:
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        return None, data
    return (header, data[8 + length :]) if isinstance(header, dict) else (None, data)


def _joined(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def _text(values: Any) -> bytes:
    return json.dumps(values).encode()


def change_bytes(random: Random, folder: Folder) -> str:
    """Bytes of any file changed, removed, put in, exchanged, or cut off."""
    names = [name for name, content in folder.items() if isinstance(content, bytes)]
    if not names:
        return "nothing"
    name = random.choice(names)
    data = bytearray(folder[name])  # type: ignore[arg-type]
    near = max(1, min(len(data), random.choice((8, 9, 200, len(data)))))
    place = random.randrange(near)
    kind = random.choice(("flip", "set", "remove", "insert", "cut", "extend", "swap", "repeat"))
    if kind == "flip" and data:
        data[min(place, len(data) - 1)] ^= 1 << random.randrange(8)
    elif kind == "set" and data:
        data[min(place, len(data) - 1)] = (
            random.choice(b'\0\xff"{}[],:\\0123456789eE-+.') if random.random() < 0.7 else random.randrange(256)
        )
    elif kind == "remove":
        del data[place : place + random.randrange(1, 20)]
    elif kind == "insert":
        data[place:place] = random.choice(
            [b"\0", b'"', b"{", b"}", b"[" * 3000, b" " * 300, b"9" * 5000, b"\xed\xa0\x80", random.randbytes(7)]
        )
    elif kind == "cut":
        del data[place:]
    elif kind == "extend":
        data += random.randbytes(random.choice((1, 8, 100)))
    elif kind == "swap" and data:
        other = random.randrange(len(data))
        place = min(place, len(data) - 1)
        data[place], data[other] = data[other], data[place]
    else:
        data[place:place] = data[place : place + random.randrange(1, 200)]
    folder[name] = bytes(data)
    return f"{kind} at {place} of {name}"


def change_length(random: Random, folder: Folder) -> str:
    """The length of a header."""
    names = _weights(folder)
    if not names:
        return "nothing"
    name = random.choice(names)
    data = folder[name]
    assert isinstance(data, bytes)
    own = int.from_bytes(data[:8], "little")
    length = random.choice(
        [
            0,
            1,
            2,
            own - 1,
            own + 1,
            own + 8,
            len(data) - 8,
            len(data),
            2**31,
            2**32,
            2**63 - 1,
            2**63,
            2**64 - 1,
            10**8,
            10**8 + 1,
        ]
    )
    folder[name] = (length % 2**64).to_bytes(8, "little") + data[8:]
    return f"{length} in {name}"


def change_header(random: Random, folder: Folder) -> str:
    """A header that is well-formed JSON, or nearly, and says something else."""
    names = _weights(folder)
    header, data = (
        _split(folder[random_name]) if (random_name := random.choice(names) if names else "") else (None, b"")
    )  # type: ignore[arg-type]
    if not header:
        return "nothing"
    told = []
    for _ in range(random.randrange(1, 4)):
        entries = list(header)
        name, other = _name(random, entries), random.choice(entries) if entries else ""
        edit = random.choice(
            (
                "shape",
                "offsets",
                "dtype",
                "field",
                "value",
                "remove",
                "rename",
                "copy",
                "exchange",
                "metadata",
                "numbers",
            )
        )
        told.append(f"{edit} {name[:40]!r}")
        entry = header.get(name)
        if edit in ("shape", "offsets", "dtype", "field", "numbers") and isinstance(entry, dict):
            if edit == "shape":
                entry["shape"] = _shape(random)
            elif edit == "offsets":
                entry["data_offsets"] = random.choice([[_number(random), _number(random)], _shape(random)])
            elif edit == "dtype":
                entry["dtype"] = random.choice(
                    ["F64", "F16", "BF16", "I64", "BOOL", "U8", "C64", "F8_E4M3", "f32", "", "F4", _value(random)]
                )
            elif edit == "field":
                entry[random.choice(("shape", "dtype", "data_offsets", "more"))] = _value(random)
            else:
                offsets = entry.get("data_offsets")
                if isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(n, int) for n in offsets):
                    move = random.choice((-8, -4, -1, 1, 4, 8))
                    entry["data_offsets"] = random.choice(
                        [[offsets[0] + move, offsets[1] + move], [offsets[0], offsets[1] + move], offsets[::-1]]
                    )
        elif edit == "value":
            header[name] = _value(random)
        elif edit == "remove":
            header.pop(name, None)
        elif edit == "rename":
            header[name] = header.pop(other, None)
        elif edit == "copy":
            header[name] = json.loads(json.dumps(header.get(other)))
        elif edit == "exchange" and name in header:
            header[name], header[other] = header.get(other), header[name]
        elif edit == "metadata":
            header["__metadata__"] = random.choice(
                [
                    {},
                    {"format": "pt"},
                    {"a": 1},
                    {"a": None},
                    [],
                    None,
                    "pt",
                    {"\ud800": "a"},
                    {"a": {"b": "c"}},
                    {"format": _value(random)},
                ]
            )
    text = _text(header)
    if random.random() < 0.1 and b'"shape"' in text:
        text = text.replace(b'"shape"', b'"dtype"', 1)
    if random.random() < 0.1:
        text += random.choice([b" ", b"\0", b"\n", b"{}", b"," * 8])
    if random.random() < 0.2:
        data = data[: random.randrange(len(data) + 1)] + random.randbytes(random.randrange(9))
    folder[random_name] = _joined(text, data)
    return f"{', '.join(told)} in {random_name}"


def change_index(random: Random, folder: Folder) -> str:
    """An index that says something else; a single file gets one."""
    content = folder.get(INDEX, b'{"metadata": {}, "weight_map": {}}')
    try:
        values = json.loads(content) if isinstance(content, bytes) else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or not isinstance(values.get("weight_map"), dict):
        return "nothing"
    weight_map = values["weight_map"] or dict.fromkeys(LAYOUT.source, SINGLE)
    values["weight_map"] = weight_map
    told = []
    for _ in range(random.randrange(1, 4)):
        name = _name(random, list(weight_map))
        edit = random.choice(("place", "place", "place", "remove", "value", "all", "map", "metadata", "move", "twice"))
        file = _file_name(random, folder)
        told.append(f"{edit} {name[:40]!r} {file[:40]!r}")
        if edit == "place":
            weight_map[name] = file
        elif edit == "remove":
            weight_map.pop(name, None)
        elif edit == "value":
            weight_map[name] = _value(random)
        elif edit == "all":
            weight_map.update(dict.fromkeys(weight_map, file))
        elif edit == "map":
            values[random.choice(("weight_map", "more"))] = random.choice(
                [{}, [], None, "x", {"a": 1}, list(weight_map), weight_map]
            )
        elif edit == "metadata":
            values["metadata"] = random.choice(
                [{}, {"total_size": _number(random)}, [], None, 3, {"a": _value(random)}]
            )
        elif edit == "move" and _weights(folder):
            weight_map[name] = random.choice(_weights(folder))
        elif edit == "twice":
            weight_map[name + " "] = weight_map.get(name, file)
    text = _text(values)
    if random.random() < 0.1:
        text = text.replace(b'"weight_map": {', b'"weight_map": {"model.norm.weight": "model.safetensors", ', 1)
    folder[INDEX] = text
    if random.random() < 0.8:
        folder.pop(SINGLE, None) if SINGLE in folder and random.random() < 0.3 else None
    return ", ".join(told)


def change_folder(random: Random, folder: Folder) -> str:
    """Files removed, exchanged, copied, or replaced by something else."""
    name = random.choice(list(folder))
    edit = random.choice(
        (
            "remove",
            "exchange",
            "copy",
            "link out",
            "link in",
            "loop",
            "pipe",
            "socket",
            "folder",
            "sparse",
            "empty",
            "absolute",
            "case",
        )
    )
    if edit == "remove":
        del folder[name]
        folder.setdefault("config.json", b"{}") if random.random() < 0.5 else None
    elif edit == "exchange":
        other = random.choice(list(folder))
        folder[name], folder[other] = folder[other], folder[name]
    elif edit == "copy":
        folder[random.choice([SINGLE, "extra.safetensors", INDEX, "link.safetensors"])] = folder[name]
    elif edit == "link out":
        folder[name] = Special("link", f"../{OUTSIDE}")
    elif edit == "absolute":
        folder[name] = Special("link", random.choice(("/etc/passwd", "/dev/zero", "/proc/self/mem", "/")))
    elif edit == "link in":
        folder["moved"] = folder.pop(name)
        folder[name] = Special("link", "moved")
    elif edit == "loop":
        folder[name] = Special("link", name)
    elif edit == "case":
        folder[name.upper()] = folder.pop(name)
    elif edit == "sparse":
        folder[name] = Special(
            "sparse",
            random.choice(
                ("00", "00e1f50500000000", "00e1f505000000007b", "10000000000000007b7d", "00000000000000ff7b")
            ),
        )
    elif edit == "empty":
        folder[name] = b""
    else:
        folder[name] = Special(edit)
    if not folder:
        folder["config.json"] = b"{}"
    return f"{edit} {name}"


Mutation = Callable[[Random, Folder], str]
_MUTATIONS: list[Mutation] = [change_bytes, change_length, change_header, change_header, change_index, change_folder]
