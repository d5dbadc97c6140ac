"""Manifests with a right checksum and wrong contents: a sentence, never a crash, and never a partial load."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import resume_toys as toys

from areno_fn import tree
from areno_fn.ckpt.manifest import MANIFEST, read_manifest
from areno_fn.ckpt.resume import latest, load_state, save_state
from areno_fn.ckpt.verify import state_problems
from areno_fn.contracts.errors import ArenoError, CheckpointError
from areno_fn.contracts.identity import RunIdentity

IDENTITY = RunIdentity(family="f", model="m", phases="p", data="d", parameters="q", optimizers="o", seed=0)
ODD: list[Any] = [
    None, True, -1, 0, 1, 3, 1 << 62, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63), 1.5, float("nan"), "", "x", "../x", "/", "\0",
    "a" * 300, b"", b"x", [], [1], [[]], {}, {"": 0}, "params.actor.w", "key.seed", "F32", "BF16", "params.actor.safetensors",
]  # fmt: skip
ROUNDS = 150


def changed(draw: random.Random, value: Any) -> Any:
    """The value with something inside it replaced, removed or doubled."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        how = draw.random()
        if how < 0.1:
            return {name: inner for name, inner in value.items() if name != key}
        if how < 0.2:
            return {**value, str(draw.choice(ODD)): value[key]}
        return {**value, key: changed(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.9:
        place = draw.randrange(len(value))
        how = draw.random()
        if how < 0.1:
            return value[:place] + value[place + 1 :]
        if how < 0.2:
            return [*value, value[place]]
        return [*value[:place], changed(draw, value[place]), *value[place + 1 :]]
    return draw.choice(ODD)


def seal(folder: Path, values: Any, version: Any = 2) -> None:
    body = msgspec.msgpack.encode(values)
    sealed = {"version": version, "sha256": hashlib.sha256(body).hexdigest(), "manifest": body}
    (folder / MANIFEST).write_bytes(msgspec.msgpack.encode(sealed))


@pytest.mark.parametrize("seed", range(4))
def test_contents_that_are_wrong_are_a_sentence(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    folder = save_state(tmp_path, 2, toys.after(2), IDENTITY, roles=toys.ROLES)
    right = toys.after(2)
    values = msgspec.msgpack.decode(msgspec.msgpack.decode((folder / MANIFEST).read_bytes())["manifest"])
    refused = 0
    for _ in range(ROUNDS):
        wrong = values
        for _ in range(draw.randint(1, 3)):
            wrong = changed(draw, wrong)
        seal(folder, wrong)
        try:
            loaded = load_state(folder, toys.start(), IDENTITY, roles=toys.ROLES)
        except ArenoError as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            # only numbers in the state itself, or what nothing reads, can have changed
            assert tree.equal((right.params, right.optim), (loaded.params, loaded.optim))
        assert isinstance(state_problems(folder), list)
        try:
            assert latest(tmp_path) in (folder, None)
        except CheckpointError as error:
            assert "none is complete" in str(error) or "holds the state of step" in str(error)
    assert refused > ROUNDS // 2


@pytest.mark.parametrize("seed", range(4))
def test_bytes_that_are_wrong_are_a_sentence(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    folder = save_state(tmp_path, 2, toys.after(2), IDENTITY, roles=toys.ROLES)
    whole = (folder / MANIFEST).read_bytes()
    for _ in range(ROUNDS):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        data = data[: draw.choice([len(data), draw.randrange(len(data))])]
        (folder / MANIFEST).write_bytes(data)
        if bytes(data) == whole:
            continue
        with pytest.raises(CheckpointError):
            read_manifest(folder)
        assert len(state_problems(folder)) == 1
