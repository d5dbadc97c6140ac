"""`python -m areno_fn.ckpt diff`: what it finds, by hand and against float64, in which order, and in how much memory."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_toys import write_folder
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from unit.test_ckpt_resume import IDENTITY, state

import areno_fn as af
from areno_fn.ckpt.resume import save_state
from areno_fn.ckpt.tools.arguments import command
from areno_fn.ckpt.tools.diff import difference
from areno_fn.ckpt.tools.numbers import Compared, compared, looked_at
from areno_fn.ckpt.tools.pieces import PIECE
from areno_fn.ckpt.tools.source import open_source
from areno_fn.ckpt.tools.ties import embedding_of, is_tied
from areno_fn.command import main
from areno_fn.contracts.errors import CheckpointError

ROOT = Path(__file__).parents[2]
Tensors = dict[str, torch.Tensor]


def file(path: Path, **tensors: Any) -> str:
    save_file({name: torch.as_tensor(value) for name, value in tensors.items()}, path, metadata={"format": "pt"})
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    code = command(["diff", *map(str, arguments)])
    return code, capsys.readouterr().out.splitlines()[2:]


def compare(capsys: pytest.CaptureFixture[str], tmp_path: Path, a: Tensors, b: Tensors, *more: object) -> Sequence[str]:
    """The lines of a comparison that must find a difference."""
    code, lines = run(capsys, file(tmp_path / "a.safetensors", **a), file(tmp_path / "b.safetensors", **b), *more)
    assert code == 1
    return lines


def test_equal_files_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = {"w": torch.tensor([1.0, math.nan, math.inf, -0.0]), "n": torch.tensor([1, 2])}
    a, b = file(tmp_path / "a.safetensors", **both), file(tmp_path / "b.safetensors", **both)
    assert run(capsys, a, b) == (
        0,
        [
            "not finite (1):",
            "  w: 1 NaN and 1 infinite in A, 1 NaN and 1 infinite in B",
            "Equal: 2 tensors, bit for bit.",
        ],
    )


def test_relative_difference_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # ||(0, 0.5)|| / ||(3, 4)|| = 0.1
    lines = compare(capsys, tmp_path, {"w": [3.0, 4.0], "v": [1.0]}, {"w": [3.0, 4.5], "v": [1.0]})
    assert lines[1:] == [
        "  relative  max abs  differing  of  tensor",
        "       0.1      0.5          1   2  w",
        "Different: 1 of other numbers; 1 tensor bit-equal.",
    ]


def test_the_largest_relative_differences_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = {"huge": [1e6], "small": [1e-6], "nan": [1.0], "equal": [1.0], "middle": [1.0]}
    b = {"huge": [1e6 + 100], "small": [3e-6], "nan": [math.nan], "equal": [1.0], "middle": [1.5]}
    lines = compare(capsys, tmp_path, a, b, "--top", 3)
    start = lines.index("largest relative differences (3 of 4):")
    assert [line.split()[-1] for line in lines[start + 2 : start + 5]] == ["nan", "small", "middle"]
    lines = compare(capsys, tmp_path, a, b, "--top", 0)
    assert [line.split()[-1] for line in lines[-5:-1]] == ["nan", "small", "middle", "huge"]


def test_missing_extra_shapes_and_dtypes_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = {"gone": [1.0], "shape": torch.ones(2, 3), "dtype": torch.ones(2), "same": [1]}
    b = {"new": [1.0], "shape": torch.ones(3, 2), "dtype": torch.ones(2, dtype=torch.bfloat16), "same": [1]}
    lines = compare(capsys, tmp_path, a, b)
    text = "\n".join(lines)
    assert "only in A (1):\n  gone" in text
    assert "only in B (1):\n  new" in text
    assert "other shapes (1):\n  shape: F32 [2, 3] in A, F32 [3, 2] in B" in text
    assert "other dtypes (1):\n  dtype: F32 [2] in A, BF16 [2] in B" in text
    assert lines[-1] == (
        "Different: 1 only in A, 1 only in B, 1 of another shape, 1 of another dtype; 1 tensor bit-equal."
    )


def test_tensors_that_are_all_zero_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = {"lost": [1.0, 2.0], "never": [0.0], "found": [0.0, -0.0], "empty": torch.zeros(0), "tiny": [0.0, 1e-45]}
    b = {"lost": [0.0, 0.0], "never": [0.0], "found": [1.0, 0.0], "empty": torch.zeros(0), "tiny": [0.0, 1e-45]}
    text = "\n".join(compare(capsys, tmp_path, a, b))
    assert "all zero in A alone (1):\n  found\n" in text
    assert "all zero in B alone (1):\n  lost\n" in text
    assert "all zero in both (1):\n  never\n" in text


def test_bits_are_compared_not_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = compare(capsys, tmp_path, {"w": [0.0, 1.0]}, {"w": [-0.0, 1.0]})
    assert lines[-2:] == [
        "         0        0          1   2  w",
        "Different: 1 of other numbers; 0 tensors bit-equal.",
    ]


def test_large_integers_that_float64_cannot_tell_apart_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = compare(capsys, tmp_path, {"w": [2**60]}, {"w": [2**60 + 1]})
    assert lines[-1] == "Different: 1 of other numbers; 0 tensors bit-equal."


def test_long_lists_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = {f"t{i}": [1.0] for i in range(30)}
    lines = compare(capsys, tmp_path, many, {"x": [1.0]})
    assert "  ... and 10 more" in lines
    lines = compare(capsys, tmp_path, many, {"x": [1.0]}, "--top", "0")
    assert sum(line.startswith("  t") for line in lines) == 30


def test_a_pattern_chooses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = file(tmp_path / "a.safetensors", **{"x.w": [1.0], "y.w": [1.0], "y.b": [1.0]})
    b = file(tmp_path / "b.safetensors", **{"x.w": [2.0], "y.w": [1.0]})
    assert run(capsys, a, b, "--pattern", "y.w")[0] == 0
    assert run(capsys, a, b, "--pattern", "y.w", "--pattern", "x.*")[0] == 1
    assert run(capsys, a, b, "--pattern", "y.*")[1][:2] == ["only in A (1):", "  y.b"]
    assert main(command, ["diff", a, b, "--pattern", "z*"]) == 2
    assert f"no tensor of {a} or {b} matches 'z*'" in capsys.readouterr().err


def test_shards_do_not_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {f"model.layers.{i}.w": torch.full((3,), float(i)) for i in range(4)}
    a, b = write_folder(tmp_path / "a", tensors), write_folder(tmp_path / "b", tensors, shards=3)
    assert run(capsys, a, b)[0] == 0
    assert run(capsys, a, a / "model.safetensors")[0] == 0


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("flipped", [False, True])
def test_a_tied_head_that_one_side_does_not_store_is_said(
    equal: bool, flipped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embed = torch.arange(6.0).reshape(3, 2)
    config = {"model_type": "llama", "tie_word_embeddings": True}
    both = {"model.embed_tokens.weight": embed, "lm_head.weight": embed.clone() if equal else embed * 2}
    a = write_folder(tmp_path / "a", both, config)
    b = write_folder(tmp_path / "b", {"model.embed_tokens.weight": embed}, config)
    code, lines = run(capsys, *((b, a) if flipped else (a, b)))
    with_head, without = ("B", "A") if flipped else ("A", "B")
    how = "which holds the same bits" if equal else f"which differs by {0.5 if not flipped else 1} relative"
    assert code == 1
    assert f"lm_head.weight is only in {with_head}; {without} ties it to model.embed_tokens.weight, {how}." in lines


def test_a_head_that_nobody_ties_is_just_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embed = {"model.embed_tokens.weight": torch.ones(3, 2)}
    a, b = (
        write_folder(tmp_path / "a", {**embed, "lm_head.weight": torch.ones(3, 2)}),
        write_folder(tmp_path / "b", embed),
    )
    lines = run(capsys, a, b)[1]
    assert lines[:2] == ["only in A (1):", "  lm_head.weight"]
    assert not [line for line in lines if "ties" in line]


def test_configurations_that_differ_are_said_and_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write_folder(tmp_path / "a", {"w": torch.ones(2)}, {"model_type": "llama", "rope_theta": 1e4, "hidden_size": 8})
    b = write_folder(tmp_path / "b", {"w": torch.ones(2)}, {"model_type": "llama", "rope_theta": 5e5})
    assert run(capsys, a, b) == (
        0,
        [
            "other fields of config.json, not counted (2):",
            "  rope_theta: 10000.0 in A, 500000.0 in B",
            "  hidden_size: 8 in A, None in B",
            "Equal: 1 tensor, bit for bit.",
        ],
    )


def test_a_file_that_changes_while_it_is_read_is_a_sentence(tmp_path: Path) -> None:
    names = [file(tmp_path / f"{name}.safetensors", w=torch.ones(3 * PIECE)) for name in "ab"]
    a, b = map(open_source, names)
    with open(names[1], "r+b") as opened:
        opened.truncate(5 * PIECE)
    threads = torch.get_num_threads()
    with pytest.raises(CheckpointError, match=r"b\.safetensors had \d+ bytes when its header was read"):
        difference(a, b)
    assert torch.get_num_threads() == threads


def test_progress_is_told_to_a_person_and_to_nobody_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = file(tmp_path / "a.safetensors", w=torch.ones(3 * PIECE), v=torch.ones(1))
    assert command(["diff", a, a]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert command(["diff", a, a]) == 0
    assert capsys.readouterr().err == "\r25 %\r50 %\r75 %\r\x1b[K"


def test_a_tensor_of_several_pieces_is_compared_in_all_of_them(tmp_path: Path) -> None:
    x = torch.ones(2 * PIECE + 3)
    y = x.clone()
    y[[0, PIECE, 2 * PIECE + 2]] = 2.0
    pair = [open_source(file(tmp_path / f"{i}.safetensors", w=w)) for i, w in enumerate((x, y))]
    found = difference(*pair).tensors["w"]
    assert (found.numel, found.differing, found.largest) == (x.numel(), 3, 1.0)
    assert found.relative == pytest.approx(math.sqrt(3 / x.numel()), rel=1e-12)


def test_where_a_configuration_ties() -> None:
    assert is_tied({"tie_word_embeddings": True}) is True
    assert is_tied({"text_config": {"tie_word_embeddings": False}}) is False
    assert is_tied({"tie_word_embeddings": "yes"}) is is_tied({}) is None
    names = ["model.language_model.embed_tokens.weight", "model.language_model.embed_tokens_per_layer.weight"]
    assert embedding_of("lm_head.weight", names) == names[0]
    assert embedding_of("model.norm.weight", names) is None
    assert embedding_of("lm_head.weight", ["a.embed_tokens.weight", "b.embed_tokens.weight"]) is None


def test_states_are_compared_with_their_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = state(0), state(0)
    other = af.replace(other, counters=af.replace(other.counters, data_epoch=9))
    a, b = save_state(tmp_path / "a", 1, one, IDENTITY), save_state(tmp_path / "b", 1, other, IDENTITY)
    assert run(capsys, a, a)[0] == 0
    code, lines = run(capsys, a, b)
    assert code == 1
    assert f"  counters.data_epoch: {one.counters.data_epoch} in A, 9 in B" in lines
    assert lines[-1].startswith("Different: 1 other value; ")
    c = save_state(tmp_path / "c", 1, state(1), IDENTITY)
    assert run(capsys, a, c, "--pattern", "params.*")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["A", "nowhere"], "nowhere is not there"),
        (["A", "A", "--device", "toaster"], "--device toaster is no device"),
        (["A", "A", "--device", "meta"], "cannot compute in float64 here"),
        (["A", "A", "--device", "cuda:99"], "CUDA devices"),
        (["A", "A", "--top", "-1"], "--top must be at least 0"),
        (["A", "."], "holds no checkpoint itself"),
        (["A", "notes.txt"], "is not a .safetensors file"),
        (["A", "a\0b"], "NUL"),
        (["A", "x" * 5000], "cannot be opened"),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "A", {"w": torch.ones(2)})
    (tmp_path / "notes.txt").write_text("x")
    assert main(command, ["diff", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_names_cannot_speak_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = compare(capsys, tmp_path, {"a\x1b[2Jb\nc": [1.0]}, {"x": [1.0]})
    assert lines[1:3] == ["  a\\x1b[2Jb", "c"]


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(floats, floats), min_size=1, max_size=40), st.integers(1, 11))
def test_pieces_add_up_to_what_float64_gives_at_once(values: list[tuple[float, float]], size: int) -> None:
    a, b = (torch.tensor(column) for column in zip(*values, strict=True))
    pairs = zip(a.split(size), b.split(size), strict=True)
    found = sum((compared(x, y) for x, y in pairs), Compared())
    x, y = a.double().numpy(), b.double().numpy()
    norm = math.sqrt(math.fsum(float(v) ** 2 for v in x))
    delta = math.sqrt(math.fsum(float(v) ** 2 for v in x - y))
    assert found.norm == pytest.approx(delta, rel=1e-12, abs=1e-80)
    assert found.a.norm == pytest.approx(norm, rel=1e-12, abs=1e-80)
    assert found.largest == float(abs(x - y).max())
    assert found.relative == pytest.approx(delta / max(norm, 2.0**-126), rel=1e-9, abs=1e-40)
    assert found.numel == len(values)
    assert found.a.zero == bool((x == 0).all())


def test_numbers_of_any_size_do_not_overflow() -> None:
    huge, tiny = torch.tensor([3e200, 4e200], dtype=torch.float64), torch.tensor([3e-200, 4e-200], dtype=torch.float64)
    assert looked_at(huge).norm == pytest.approx(5e200)
    assert looked_at(tiny).norm == pytest.approx(5e-200)
    assert not looked_at(tiny).zero


def test_an_element_that_is_finite_on_one_side_only_is_infinitely_far() -> None:
    a, b = torch.tensor([1.0, math.nan, math.inf, math.inf]), torch.tensor([1.0, 2.0, math.inf, -math.inf])
    found = compared(a, b)
    assert (found.relative, found.odd, found.differing, found.largest) == (math.inf, 2, 2, 0.0)
    assert (found.a.nan, found.a.inf, found.b.nan, found.b.inf) == (1, 2, 0, 2)


MEASURED = """
import resource, runpy
import areno_fn.ckpt.tools.commands
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    runpy.run_module("areno_fn.ckpt", run_name="__main__")
except SystemExit as end:
    print(end.code, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    """One tensor of 64 MiB on each side, 256 MiB in float64, of which nearly nothing is on the disk."""
    elements = 1 << 25
    header = b'{"w":{"dtype":"BF16","shape":[%d],"data_offsets":[0,%d]}}' % (elements, 2 * elements)
    for name, last in (("a", b"\x80\x3f"), ("b", b"\x00\x40")):
        with (tmp_path / f"{name}.safetensors").open("wb") as opened:
            opened.write(len(header).to_bytes(8, "little") + header)
            opened.seek(2 * elements - 2, 1)
            opened.write(last)
    files = [str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, "diff", *files], capture_output=True, text=True, check=True, cwd=ROOT
    )
    *lines, last_line = done.stdout.splitlines()
    assert lines[4].split() == ["1", "1", "1", str(elements), "w"]  # the last element is 1 in A and 2 in B
    code, mebibytes = map(int, last_line.split())
    assert code == 1
    assert mebibytes < 250  # one of the two in float64 would need that
