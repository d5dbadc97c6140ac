"""What a folder of state says about itself, read again: every problem at once; and folders that an earlier version wrote."""

from __future__ import annotations

import hashlib
from pathlib import Path

import attrs
import msgspec
import pytest
import resume_toys as toys
import safetensors.torch
import torch

from areno_fn import tree
from areno_fn.ckpt.manifest import MANIFEST, read_manifest
from areno_fn.ckpt.resume import latest, load_state, save_state
from areno_fn.ckpt.trees import flatten
from areno_fn.ckpt.verify import state_problems, verify_state
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.identity import RunIdentity
from areno_fn.contracts.record import replace
from areno_fn.contracts.roles import Role, RoleLayout
from areno_fn.contracts.state import TrainState

IDENTITY = RunIdentity(family="f", model="m", phases="p", data="d", parameters="q", optimizers="o", seed=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_state(tmp_path, 2, toys.after(2), IDENTITY, roles=toys.ROLES)


def test_a_whole_folder_has_no_problems(folder: Path) -> None:
    assert state_problems(folder) == []
    manifest = verify_state(folder)
    assert (manifest.step, manifest.identity) == (2, IDENTITY)
    assert sum(file.size for file in manifest.files) == sum(
        path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST
    )


def test_every_problem_is_named(folder: Path, tmp_path: Path) -> None:
    flip(folder / "params.actor.safetensors")
    (folder / "optim.actor.safetensors").unlink()
    with (folder / "params.critic.safetensors").open("ab") as file:
        file.write(b"x")
    safetensors.torch.save_file({"key.seed": torch.ones(2)}, folder / "key.safetensors")
    outside = tmp_path / "outside.safetensors"
    (folder / "params.teacher.safetensors").rename(outside)
    (folder / "params.teacher.safetensors").symlink_to(outside)
    (folder / "more.txt").write_text("")
    found = state_problems(folder)
    for name, words in {
        "params.actor": "is damaged: its SHA-256 is ",
        "optim.actor": "cannot be read (No such file or directory)",
        "params.critic": "is over-long",
        "key": "bytes, expected",
        "params.teacher": "is a link to",
        "more.txt": "is not named by the manifest",
    }.items():
        assert any(name in problem and words in problem for problem in found), (name, found)
    assert len(found) == 6
    with pytest.raises(CheckpointError) as caught:
        verify_state(folder)
    assert str(caught.value).splitlines() == found


def flip(path: Path) -> None:
    bits = bytearray(path.read_bytes())
    bits[-1] ^= 1
    path.write_bytes(bits)


@pytest.mark.parametrize("what", ["missing", "damaged", "folder"])
def test_without_a_manifest_there_is_one_problem(what: str, folder: Path) -> None:
    if what == "damaged":
        flip(folder / MANIFEST)
    elif what == "missing":
        (folder / MANIFEST).unlink()
    place = folder / "none" if what == "folder" else folder
    (problem,) = state_problems(place)
    assert str(place / MANIFEST) in problem
    with pytest.raises(CheckpointError, match="manifest"):
        verify_state(place)


# ------------------------------------------------------------------------------------------------- roles


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (toys.ROLES.roles[:2], "role 'teacher' is not expected"),
        ((*toys.ROLES.roles, Role(name="judge", trainable=False)), "role 'judge' is missing"),
        (
            (Role(name="actor", exported=False), Role(name="critic"), Role(name="teacher", exported=False)),
            "role 'actor' has exported = True, it should be False; role 'critic' has exported = False, it should be True; "
            "role 'teacher' has trainable = False, it should be True",
        ),
    ],
)
def test_other_roles_are_refused_before_a_file_is_opened(
    roles: tuple[Role, ...], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areno_fn.ckpt.resume.read_header", lambda *_: pytest.fail("a file was opened"))
    with pytest.raises(CheckpointError) as caught:
        load_state(folder, toys.start(), IDENTITY, roles=RoleLayout(roles=roles))
    assert str(caught.value) == f"{folder} does not hold what is expected: {words}"


def test_roles_and_tensors_that_differ_are_named_together(folder: Path) -> None:
    like = toys.start(width=7)
    fewer = replace(like, params={name: like.params[name] for name in ("actor", "critic")})
    with pytest.raises(CheckpointError) as caught:
        load_state(folder, fewer, IDENTITY, roles=RoleLayout(roles=toys.ROLES.roles[:2]))
    for words in (
        "role 'teacher' is not expected",
        "'params.actor.w' is bfloat16 [6], it should be bfloat16 [7]",
        "'optim.actor.master.w' is float32 [6], it should be float32 [7]",
        "'params.teacher.w' is not expected",
    ):
        assert words in str(caught.value)


def test_accepted_fields_reach_the_state(folder: Path) -> None:
    other = attrs.evolve(IDENTITY, data="x", seed=1)
    with pytest.raises(CheckpointError, match="seed was 0 and is now 1; resume"):
        load_state(folder, toys.start(), other, roles=toys.ROLES, accept=("data",))
    back = load_state(folder, toys.start(), other, roles=toys.ROLES, accept=("data", "seed"))
    assert tree.equal(back, toys.after(2))


# ------------------------------------------------------------------------------------------------- version 1


def first_version(root: Path, state: TrainState, step: int) -> Path:
    """A folder as version 1 was: one file, and a manifest that does not describe it."""
    path = root / f"step-{step:08d}"
    path.mkdir(parents=True)
    flat = flatten(state)
    data = path / "state.safetensors"
    safetensors.torch.save_file(dict(flat.tensors), data, metadata={"format": "pt"})
    file = {"name": data.name, "size": data.stat().st_size, "sha256": hashlib.sha256(data.read_bytes()).hexdigest()}
    values = msgspec.to_builtins(flat.values)
    manifest = {"version": 1, "step": step, "identity": attrs.asdict(IDENTITY), "file": file, "values": values}
    (path / MANIFEST).write_bytes(msgspec.msgpack.encode(manifest))
    return path


def test_a_folder_of_version_1_is_read_and_followed_by_one_of_version_2(tmp_path: Path) -> None:
    path = first_version(tmp_path, toys.after(3), 3)
    assert latest(tmp_path) == path and state_problems(path) == []
    manifest = read_manifest(path)
    assert (manifest.version, manifest.roles, [file.name for file in manifest.files]) == (
        1,
        None,
        ["state.safetensors"],
    )
    back = load_state(path, toys.start(), IDENTITY, roles=toys.ROLES)
    assert tree.equal(back, toys.after(3))
    after = save_state(tmp_path, 4, toys.after(4), IDENTITY, keep=1, roles=toys.ROLES)
    assert latest(tmp_path) == after and not path.exists()


def test_a_damaged_folder_of_version_1_is_refused(tmp_path: Path) -> None:
    path = first_version(tmp_path, toys.after(3), 3)
    flip(path / "state.safetensors")
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256 is"):
        load_state(path, toys.start(), IDENTITY)
    (path / "state.safetensors").unlink()
    with pytest.raises(CheckpointError, match="none is complete"):
        latest(tmp_path)


def test_a_folder_of_a_later_version_is_not_passed_over(folder: Path, tmp_path: Path) -> None:
    """Going on from an older one would take back what the later release has done."""
    later = tmp_path / "step-00000009"
    later.mkdir()
    (later / MANIFEST).write_bytes(msgspec.msgpack.encode({"version": 3, "anything": 1}))
    with pytest.raises(CheckpointError, match="step-00000009 has version 3, this library reads versions 1 and 2"):
        latest(tmp_path)
    assert folder.exists()


# ------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["a/b", "..", "ü", "a b", "a.b", "%", "x" * 100])
def test_a_role_may_have_any_name(name: str, tmp_path: Path) -> None:
    state = toys.start()
    state = replace(
        state,
        params={name: state.params["actor"], "a": {"b": {"c": torch.ones(1)}}},
        optim={name: state.optim["actor"]},
        snapshots={},
    )
    path = save_state(tmp_path, 1, state, IDENTITY)
    assert verify_state(path).optimizers.keys() == {name}
    assert all(child.parent == path and child.is_file() for child in path.rglob("*"))
    assert tree.equal(load_state(path, state, IDENTITY), state)
