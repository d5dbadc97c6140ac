"""Damaged files of every kind through every command: an answer or a sentence, never a traceback, and always an end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ckpt_toys import write_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.test_ckpt_resume import IDENTITY, state

from areno_fn.ckpt.peft import AdapterConfig, key_of, write_adapter
from areno_fn.ckpt.resume import save_state
from areno_fn.ckpt.tools.arguments import command
from areno_fn.command import main
from areno_fn.contracts.errors import CheckpointError

TENSORS = {"model.embed_tokens.weight": torch.ones(3, 2), "mlp.up_proj.weight": torch.eye(2)}
CONFIG = {"model_type": "llama", "tie_word_embeddings": True, "text_config": {"hidden_size": 2}}


def an_adapter(path: Path) -> Path:
    tensors = {key_of("mlp.up_proj", "A"): torch.ones(1, 2), key_of("mlp.up_proj", "B"): torch.ones(2, 1)}
    config = AdapterConfig(r=1, lora_alpha=3, target_modules=("up_proj",), alpha_pattern={"up_proj": 2})
    return write_adapter(path, config, tensors)


KINDS: dict[str, Callable[[Path], Path]] = {
    "single": lambda path: write_folder(path, TENSORS, CONFIG),
    "shards": lambda path: write_folder(path, TENSORS, CONFIG, shards=2),
    "state": lambda path: save_state(path, 1, state(), IDENTITY),
    "adapter": an_adapter,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind, and a model to merge adapters into."""
    root = tmp_path_factory.mktemp("whole")
    return {kind: make(root / kind) for kind, make in KINDS.items()}


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A change of some bytes, of the length, or of a word."""
    kind = draw(st.sampled_from(["flip", "cut", "add", "word", "swap"]))
    seed = draw(st.integers(0, 2**31))
    junk = draw(st.binary(min_size=1, max_size=9))
    words = st.sampled_from(
        [b"0", b"-1", b"null", b"{}", b"[]", b'"x"', b"1e999", b"NaN", b"99999999999999999999", b"true"]
    )
    word = draw(words)

    def change(data: bytes) -> bytes:
        place = seed % (len(data) + 1)
        if kind == "flip":
            return data[:place] + junk + data[place + len(junk) :]
        if kind == "cut":
            return data[:place]
        if kind == "add":
            return data[:place] + junk + data[place:]
        tokens = [i for i, byte in enumerate(data) if byte in b':,[{"']
        if not tokens:
            return junk
        start = tokens[seed % len(tokens)] + 1
        if kind == "word":
            return data[:start] + word + data[start + 1 :]
        return data[:start] + data[start + len(junk) :] + data[start : start + len(junk)]

    return change


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_answered(
    kind: str, data: st.DataObject, whole: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, out = tmp_path / "damaged", tmp_path / "out"
    for old in (place, out):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(whole[kind], place)
    name = data.draw(st.sampled_from(sorted(os.listdir(place))))
    (place / name).write_bytes(data.draw(mutations())((place / name).read_bytes()))
    codes = [
        main(command, [*words.split(), str(place)])
        for words in ("inspect --tensors", "inspect --json", "verify --hash --values", f"diff {whole[kind]}")
    ]
    merged = ["--merge", str(place)] if kind == "adapter" else []
    codes.append(main(command, ["convert", str(whole["single"] if merged else place), str(out), *merged]))
    written = capsys.readouterr()
    assert set(codes) <= {0, 1, 2}
    assert (2 in codes) == bool(written.err)
    assert all(line.startswith("error: ") for line in written.err.splitlines())
    assert out.exists() == (codes[-1] == 0)


@pytest.mark.parametrize("bad", ["x" * 300, "file/below", "a\0b"])
def test_places_where_nothing_can_be_written_or_read(bad: str, whole: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = f"{tmp_path}/{bad}"
    for arguments in (
        ["convert", str(whole["single"]), place],
        ["convert", str(whole["single"]), "o", "--merge", place],
    ):
        assert main(command, arguments) == 2
    with pytest.raises(CheckpointError):
        write_adapter(place, AdapterConfig(r=1, lora_alpha=1, target_modules=("a",)), {})
