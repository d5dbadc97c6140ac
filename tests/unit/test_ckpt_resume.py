"""Resumable state: the inverse bit for bit, refusals before anything is read, the newest complete one."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import safetensors.torch
import torch
from ckpt_toys import random_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from areno_fn import random, tree
from areno_fn.ckpt.manifest import MANIFEST, read_manifest
from areno_fn.ckpt.resume import latest, load_state, save_state
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import record, replace, static
from areno_fn.contracts.state import Counters, Cursor, TrainState

IDENTITY = RunIdentity(family="llama", model="a", phases="b", data="c", parameters="d", optimizers="e", seed=3)


@record
class Adam:
    master: dict[str, torch.Tensor]
    mu: dict[str, torch.Tensor]
    count: int = 0
    beta: float = static(default=0.9)


def state(seed: int = 0, *, snapshot: bool = True, count: int = 4) -> TrainState:
    """Two roles, any bits, and a snapshot that shares the memory of the first role."""
    generator = torch.Generator().manual_seed(seed)
    actor = {"w": random_bits((3, 2), torch.bfloat16, generator), "b": random_bits((2,), torch.float32, generator)}
    critic = {"v": random_bits((4,), torch.float32, generator)}
    adam = Adam(master={"w": random_bits((3, 2), torch.float32, generator)}, mu={"w": torch.zeros(3, 2)}, count=count)
    return TrainState(
        params={"actor": actor, "critic": critic},
        optim={"actor": adam},
        snapshots={"reference": dict(actor)} if snapshot else {},
        counters=Counters(optimizer_step=3, rollout_iteration=7, data_epoch=0),
        key=Key.of(2**63 + seed),
        cursor=Cursor(phase=1, step=2, epoch=3, batch=4),
    )


def meta(value: TrainState) -> TrainState:
    return tree.map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, value)


def refuse(call: Any, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


PARTS = [
    "key.safetensors",
    "optim.actor.safetensors",
    "params.actor.safetensors",
    "params.critic.safetensors",
]
"""The files of `state()`, whose snapshot is stored as the first role's parameters."""
ACTOR, CRITIC = PARTS[2], PARTS[3]


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = save_state(tmp_path / "root", 12, state(), IDENTITY)
    assert path == tmp_path / "root" / "step-00000012" and names(path) == sorted([MANIFEST, *PARTS])
    for like in (state(9), meta(state())):
        assert tree.first_difference(load_state(path, like, IDENTITY), state()) is None


def test_C4_counters_and_cursor_are_kept_as_they_are(tmp_path: Path) -> None:
    back = load_state(save_state(tmp_path, 0, state(), IDENTITY), meta(state()), IDENTITY)
    assert (back.counters.optimizer_step, back.counters.rollout_iteration, back.counters.data_epoch) == (3, 7, 0)
    assert (back.cursor.phase, back.cursor.step, back.cursor.epoch, back.cursor.batch) == (1, 2, 3, 4)


def test_K20_the_key_continues_its_stream(tmp_path: Path) -> None:
    """Dropout-like noise on a toy net: 6 steps, against 3, saved, loaded, and 3 more."""

    def run(value: TrainState, steps: int) -> TrainState:
        for _ in range(steps):
            weight = value.params["actor"]["b"]
            noise = random.normal(value.key.fold(value.counters.optimizer_step), torch.arange(2))
            params = {**value.params, "actor": {**value.params["actor"], "b": weight * 0.9 + noise}}
            value = replace(value, params=params, counters=value.counters.advance_optimizer())
        return value

    start = replace(
        state(), params={**state().params, "actor": {"w": state().params["actor"]["w"], "b": torch.ones(2)}}
    )
    half = run(start, 3)
    loaded = load_state(save_state(tmp_path, 3, half, IDENTITY), meta(half), IDENTITY)
    assert tree.first_difference(run(loaded, 3), run(start, 6)) is None


def test_shared_memory_is_stored_once_and_shared_again(tmp_path: Path) -> None:
    """At the start of a phase the reference snapshot is the parameters themselves."""
    shared, apart = state(), replace(state(), snapshots={"reference": tree.map(torch.clone, state().params["actor"])})
    one, two = save_state(tmp_path / "1", 0, shared, IDENTITY), save_state(tmp_path / "2", 0, apart, IDENTITY)
    assert names(two) == sorted([MANIFEST, *PARTS, "snapshots.reference.safetensors"])
    assert names(one) == sorted([MANIFEST, *PARTS])
    assert sum((one / name).stat().st_size for name in PARTS) == sum((two / name).stat().st_size for name in PARTS)
    back = load_state(one, meta(state()), IDENTITY)
    assert back.snapshots["reference"]["w"] is back.params["actor"]["w"]
    apart_again = load_state(two, meta(apart), IDENTITY)
    assert apart_again.snapshots["reference"]["w"] is not apart_again.params["actor"]["w"]
    assert tree.equal(back, apart_again)


POOL = [torch.ones(2), torch.zeros(0, 3), torch.tensor(5), torch.ones(2, 3, dtype=torch.bfloat16).t(), torch.ones(2)]


@settings(max_examples=25, deadline=None)
@given(picks=st.lists(st.integers(0, len(POOL) - 1), min_size=9, max_size=9))
def test_whatever_is_shared_over_all_parts_is_stored_once_and_shared_again(picks: list[int]) -> None:
    """Nine leaves in params, optim and snapshots, each any of five tensors."""
    leaves = iter(POOL[pick] for pick in picks)
    names = {"params": ("actor", "critic", "teacher"), "optim": ("actor", "critic"), "snapshots": ("reference", "old")}
    parts = {field: {name: {"x": next(leaves)} for name in inner} for field, inner in names.items()}
    parts["optim"]["actor"] |= {"mu": next(leaves), "nu": [next(leaves)]}
    value = replace(state(), **parts)
    with tempfile.TemporaryDirectory() as folder:
        path = save_state(folder, 1, value, IDENTITY)
        stored = [name for file in read_manifest(path).files for name in file.tensors if name.split(".")[0] in names]
        back = load_state(path, meta(value), IDENTITY)
    assert len(stored) == len(set(picks))
    assert tree.equal(back, value)
    found = [leaf for part in (back.params, back.optim, back.snapshots) for leaf in tree.leaves(part)]
    given_ = [leaf for part in (value.params, value.optim, value.snapshots) for leaf in tree.leaves(part)]
    same = [[one is other for other in found] for one in found]
    assert same == [[one is other for other in given_] for one in given_]


def test_K19_a_later_file_differs_where_something_was_trained(tmp_path: Path) -> None:
    first = state()
    moved = replace(first, params={**first.params, "critic": {"v": torch.ones(4)}})
    load = lambda path: load_state(path, meta(first), IDENTITY)  # noqa: E731
    before, after = load(save_state(tmp_path, 0, first, IDENTITY)), load(save_state(tmp_path, 1, moved, IDENTITY))
    assert tree.equal(before.params["actor"], after.params["actor"])
    assert not tree.equal(before.params["critic"], after.params["critic"])


# ------------------------------------------------------------------------------------------------- which one


def test_the_newest_by_number(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None and latest(tmp_path) is None
    for step in (9, 10, 100_000_000):
        save_state(tmp_path, step, state(), IDENTITY, keep=9)
        assert latest(tmp_path) == tmp_path / f"step-{step:08d}"
    (tmp_path / "step-x").mkdir()
    (tmp_path / "notes").write_text("")
    assert latest(tmp_path) == tmp_path / "step-100000000"


@pytest.mark.parametrize("damage", ["no manifest", "no data", "short data", "manifest cut", "empty"])
def test_K16_an_incomplete_one_is_passed_over(damage: str, tmp_path: Path) -> None:
    save_state(tmp_path, 1, state(), IDENTITY)
    newest = save_state(tmp_path, 2, state(), IDENTITY)
    if damage in ("no manifest", "empty"):
        (newest / MANIFEST).unlink()
    if damage in ("no data", "empty"):
        (newest / CRITIC).unlink()
    if damage == "short data":
        os.truncate(newest / ACTOR, 100)
    if damage == "manifest cut":
        os.truncate(newest / MANIFEST, 20)
    assert latest(tmp_path) == tmp_path / "step-00000001"
    refuse(lambda: load_state(newest, meta(state()), IDENTITY), str(newest))


def test_a_run_does_not_restart_unnoticed(tmp_path: Path) -> None:
    (save_state(tmp_path, 5, state(), IDENTITY) / MANIFEST).unlink()
    refuse(lambda: latest(tmp_path), f"{tmp_path} holds step-00000005, but none is complete; remove them to start anew")


def test_the_newest_k_stay(tmp_path: Path) -> None:
    for step in range(5):
        save_state(tmp_path, step, state(), IDENTITY, keep=2)
        assert names(tmp_path) == [f"step-{n:08d}" for n in range(max(0, step - 1), step + 1)]
    save_state(tmp_path, 5, state(), IDENTITY, keep=1)
    assert names(tmp_path) == ["step-00000005"]


def test_incomplete_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_state(tmp_path, step, state(), IDENTITY, keep=9)
    (tmp_path / "step-00000003" / MANIFEST).unlink()
    save_state(tmp_path, 4, state(), IDENTITY, keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_a_state_is_saved_again_under_its_number(tmp_path: Path) -> None:
    save_state(tmp_path, 1, state(0), IDENTITY)
    path = save_state(tmp_path, 1, state(1), IDENTITY)
    assert names(tmp_path) == ["step-00000001"]
    assert tree.equal(load_state(path, meta(state()), IDENTITY), state(1))


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("field", [f.name for f in attrs.fields(RunIdentity)])
def test_another_run_is_refused_before_anything_is_read(field: str, tmp_path: Path) -> None:
    path = save_state(tmp_path, 1, state(), IDENTITY)
    for name in PARTS:
        (path / name).unlink()
    other = attrs.evolve(IDENTITY, **{field: 99 if field == "seed" else "other"})
    refuse(lambda: load_state(path, meta(state()), other), str(path), "belongs to another run", field)


def test_another_structure_is_refused_before_a_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_state(tmp_path, 1, state(), IDENTITY)
    monkeypatch.setattr("areno_fn.ckpt.tensorfile.os.preadv", lambda *_: pytest.fail("a tensor was read"))
    like = state()
    wide = replace(like, params={**like.params, "critic": {"v": torch.zeros(5)}})
    refuse(lambda: load_state(path, wide, IDENTITY), "'params.critic.v' is float32 [4], it should be float32 [5]")
    fewer = replace(like, snapshots={})
    refuse(lambda: load_state(path, fewer, IDENTITY), "'snapshots.reference.w' is not expected")
    other = replace(like, optim={"actor": replace(like.optim["actor"], beta=0.8)})
    refuse(lambda: load_state(path, other, IDENTITY), "'optim.actor.beta' is the float 0.9, it should be 0.8")


@pytest.mark.parametrize("name", PARTS)
def test_every_damaged_byte_of_the_tensors_is_noticed(name: str, tmp_path: Path) -> None:
    file = save_state(tmp_path, 1, state(), IDENTITY) / name
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in range(header, len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        refuse(
            lambda: load_state(file.parent, meta(state()), IDENTITY), f"{file} is damaged: its SHA-256 is", "expected"
        )


def test_every_damaged_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    save_state(tmp_path, 1, state(), IDENTITY)
    path = save_state(tmp_path, 2, state(), IDENTITY)
    whole = (path / MANIFEST).read_bytes()
    for place in range(len(whole)):
        (path / MANIFEST).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        refuse(lambda: load_state(path, meta(state()), IDENTITY), str(path))


def test_K13_a_file_of_another_length(tmp_path: Path) -> None:
    file = save_state(tmp_path, 1, state(), IDENTITY) / ACTOR
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    load = lambda: load_state(file.parent, meta(state()), IDENTITY)  # noqa: E731
    refuse(load, f"expected {len(whole)} bytes by its header, it has {len(whole) - 1}")
    safetensors.torch.save_file({"a": torch.ones(1)}, file)
    refuse(load, f"has {file.stat().st_size} bytes, expected {len(whole)} by its manifest")


def test_other_tensors_in_a_file_are_all_named(tmp_path: Path) -> None:
    file = save_state(tmp_path, 1, state(), IDENTITY) / ACTOR
    values = read_values(file.parent)
    safetensors.torch.save_file({"params.actor.b": torch.ones(3), "x": torch.ones(1)}, file)
    for described in values["files"]:
        if described["name"] == ACTOR:
            described["size"] = file.stat().st_size
    write_manifest(file.parent, values)
    refuse(
        lambda: load_state(file.parent, meta(state()), IDENTITY),
        f"{file} does not hold what is expected: 'params.actor.w' is not there, expected bfloat16 [3, 2]; "
        "'params.actor.b' is float32 [3], expected float32 [2]; 'x' is float32 [1], expected nothing of that name",
    )


def read_values(folder: Path) -> dict[str, Any]:
    """What a manifest says, in plain values."""
    return msgspec.msgpack.decode(msgspec.msgpack.decode((folder / MANIFEST).read_bytes())["manifest"])


def write_manifest(folder: Path, values: dict[str, Any]) -> None:
    """Writes a manifest with a right checksum, whatever it says."""
    body = msgspec.msgpack.encode(values)
    sealed = {"version": values["version"], "sha256": hashlib.sha256(body).hexdigest(), "manifest": body}
    (folder / MANIFEST).write_bytes(msgspec.msgpack.encode(sealed))


FILE = {"name": "a.safetensors", "size": 1, "sha256": "0" * 64, "tensors": {}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 3}, "has version 3, this library reads versions 1 and 2; use the release that wrote it"),
        ({"step": "x"}, "is damaged"),
        ({"more": 1}, "is damaged"),
        ({"files": [FILE | {"name": "../../secret.safetensors"}]}, "is damaged"),
        ({"files": [FILE | {"sha256": "0"}]}, "is damaged"),
        ({"files": [FILE | {"size": -1}]}, "is damaged"),
        ({"files": [FILE | {"tensors": {"a": {"dtype": "C64", "shape": [1]}}}]}, "'a' has dtype 'C64', known are BOOL"),
        ({"files": [FILE, FILE]}, "it names the file a.safetensors twice"),
        ({"roles": [{"name": "actor", "trainable": 3}]}, "is damaged"),
        ({"identity": {"family": "llama"}}, "is damaged"),
        ({"values": {"aliases": {"a": "b"}}}, "'a' is stored as 'b', which is not there"),
        ({"values": {"version": 7}}, "its values have version 7"),
        ({"values": {"scalars": {"params.critic.v": 1}}}, "holds 'params.critic.v' twice"),
    ],
)
def test_manifests_that_lie(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = save_state(tmp_path, 1, state(), IDENTITY)
    values = read_values(path)
    write_manifest(path, {**values, **change})
    refuse(lambda: load_state(path, meta(state()), IDENTITY), str(path), words)


def test_a_manifest_says_what_it_is_about(tmp_path: Path) -> None:
    manifest = read_manifest(save_state(tmp_path, 41, state(), IDENTITY))
    assert (manifest.step, manifest.identity, manifest.values.scalars["optim.actor.count"]) == (41, IDENTITY, 4)
    refuse(lambda: read_manifest(tmp_path), "cannot be read")


def test_arguments_out_of_range(tmp_path: Path) -> None:
    for step, keep in ((-1, 1), (0, 0)):
        refuse(
            lambda step=step, keep=keep: save_state(tmp_path, step, state(), IDENTITY, keep), "step must be an integer"
        )


def test_no_pickle(tmp_path: Path) -> None:
    path = save_state(tmp_path, 1, state(), IDENTITY)
    unstorable = replace(state(), optim={"actor": {"schedule": min}})
    refuse(
        lambda: save_state(tmp_path, 2, unstorable, IDENTITY), "'optim.actor.schedule' is a builtin_function_or_method"
    )
    assert latest(tmp_path) == path and names(tmp_path) == ["step-00000001"]
