"""Damaged and hostile files: whatever is accepted, the safetensors library accepts, with the same tensors."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import safetensors.torch
import torch
from ckpt_toys import same_bits, write_folder
from hypothesis import given, settings
from safetensors import SafetensorError

from areno_fn.ckpt.header import read_header
from areno_fn.ckpt.store import INDEX, open_store
from areno_fn.ckpt.tensorfile import Reader
from areno_fn.contracts.errors import CheckpointError

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "bb": torch.tensor([1, -2], dtype=torch.int64), "c": torch.ones(0, 2)}
WHOLE = safetensors.torch.save(TENSORS, metadata={"format": "pt"})
HEADER = json.loads(WHOLE[8 : 8 + int.from_bytes(WHOLE[:8], "little")])
DATA = WHOLE[8 + int.from_bytes(WHOLE[:8], "little") :]


def judged(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        path.write_bytes(data)
        try:
            header = read_header(path)
        except CheckpointError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            return
        with Reader() as reader:
            received = {name: reader.read(header, name) for name in header.entries}
    try:
        expected = safetensors.torch.load(data)
    except SafetensorError as error:
        raise AssertionError(f"the library refuses what was accepted: {error}") from error
    assert same_bits(received, expected)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid file with bytes changed, removed or put in."""
    data = bytearray(WHOLE)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["change", "remove", "insert", "cut", "swap"]))
        if kind == "change" and data:
            data[place] = draw(st.integers(0, 255))
        elif kind == "remove":
            del data[place : place + draw(st.integers(1, 9))]
        elif kind == "insert":
            data[place:place] = draw(st.binary(min_size=1, max_size=9))
        elif kind == "cut":
            del data[place:]
        elif data:
            other = draw(st.integers(0, len(data) - 1))
            data[place], data[other] = data[other], data[place]
    return bytes(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
EDITS = st.sampled_from(["dtype", "shape", "data_offsets"])
NUMBERS = st.lists(st.integers(-1, 40) | st.just(2**63) | st.just(2**64), max_size=4)


@st.composite
def edited(draw: st.DrawFn) -> bytes:
    """A file whose header is well-formed JSON that says something else."""
    header: dict[str, Any] = json.loads(json.dumps(HEADER))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*header, "new"]))
        edit = draw(st.sampled_from(["field", "replace", "remove", "copy", "numbers"]))
        if edit == "field" and isinstance(header.get(name), dict):
            header[name][draw(EDITS)] = draw(JSON)
        elif edit == "numbers" and isinstance(header.get(name), dict):
            header[name][draw(st.sampled_from(["shape", "data_offsets"]))] = draw(NUMBERS)
        elif edit == "replace":
            header[name] = draw(JSON)
        elif edit == "copy":
            header[name] = json.loads(json.dumps(header.get("a")))
        else:
            header.pop(name, None)
    text = json.dumps(header).encode()
    length = len(text) + draw(st.sampled_from([0, 0, 0, 1, -1]))
    return length.to_bytes(8, "little") + text + DATA[: draw(st.integers(0, len(DATA)))] + draw(st.binary(max_size=2))


@settings(max_examples=400)
@given(mutated())
def test_K13_mutated_files(data: bytes) -> None:
    judged(data)


@settings(max_examples=400)
@given(edited())
def test_headers_that_say_something_else(data: bytes) -> None:
    judged(data)


@given(st.binary(max_size=64))
def test_random_files(data: bytes) -> None:
    judged(data)


def test_the_unharmed_file_is_accepted() -> None:
    judged(WHOLE)


ONE, TWO, THREE = (f"x-{number}.safetensors" for number in (1, 2, 3))
PLACES = {"a": ONE, "bb": TWO, "c": TWO}
FILES = [ONE, TWO, THREE, f"../{ONE}", "/etc/passwd", "secret.safetensors"]


@st.composite
def indexes(draw: st.DrawFn) -> str:
    values: dict[str, Any] = {"metadata": {"total_size": 40}, "weight_map": dict(PLACES)}
    for _ in range(draw(st.integers(1, 3))):
        target = values["weight_map"] if draw(st.booleans()) and isinstance(values.get("weight_map"), dict) else values
        name = draw(st.sampled_from(["a", "bb", "c", "new", "metadata", "weight_map"]))
        target[name] = draw(st.sampled_from(FILES) | JSON)
    text = json.dumps(values)
    return draw(st.sampled_from([text, text[:-1], text.replace('"bb"', '"a"')]))


@given(indexes())
def test_mutated_indexes(text: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / ONE).write_bytes(safetensors.torch.save({"secret": torch.ones(1)}))
        folder = write_folder(root / "model", TENSORS)
        (folder / "model.safetensors").unlink()
        (folder / ONE).write_bytes(safetensors.torch.save({"a": TENSORS["a"]}))
        (folder / TWO).write_bytes(safetensors.torch.save({k: TENSORS[k] for k in ("bb", "c")}))
        (folder / "secret.safetensors").symlink_to(root / ONE)
        (folder / INDEX).write_text(text)
        try:
            store = open_store(folder)
        except CheckpointError as error:
            assert "\n" not in str(error)
            return
        assert store.places == PLACES
