"""`python -m areno_fn.ckpt convert`: dtype, shards and merged adapters, by hand; what is refused; all or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_toys import read_files, same_bits, write_folder

from areno_fn.ckpt.peft import AdapterConfig, key_of, write_adapter
from areno_fn.ckpt.tools.arguments import command
from areno_fn.ckpt.tools.convert import bytes_of, convert
from areno_fn.command import main
from areno_fn.contracts.errors import CheckpointError

W = "model.layers.0.mlp.up_proj.weight"
MODULE = W.removesuffix(".weight")
CONFIG = {"model_type": "llama", "dtype": "float32", "tie_word_embeddings": False}


def folder(path: Path, tensors: dict[str, Any] | None = None, **changes: Any) -> Path:
    given = {W: torch.eye(2), "model.norm.weight": torch.ones(2, dtype=torch.bfloat16)} if tensors is None else tensors
    made = {name: torch.as_tensor(tensor) for name, tensor in given.items()}
    shards = changes.pop("shards", 1)
    return write_folder(path, made, {**CONFIG, **changes}, shards, metadata={"format": "pt", "by": "me"})


def adapter(path: Path, module: str = MODULE, **changes: Any) -> Path:
    a, b = changes.pop("a", [[1.0, 1.0]]), changes.pop("b", [[1.0], [0.0]])
    config = AdapterConfig(**{"r": 1, "lora_alpha": 2, "target_modules": (module,), **changes})
    tensors = {key_of(module, "A"): torch.as_tensor(a), key_of(module, "B"): torch.as_tensor(b)}
    return write_adapter(path, config, tensors)


def test_K22_a_merge_by_hand(tmp_path: Path) -> None:
    convert(folder(tmp_path / "w"), tmp_path / "out", adapter=adapter(tmp_path / "a"))
    tensors, _ = read_files(tmp_path / "out")
    assert tensors[W].tolist() == [[3.0, 2.0], [0.0, 1.0]]
    assert tensors["model.norm.weight"].tolist() == [1.0, 1.0]


def test_weights_stored_the_other_way_round_take_the_transposed_product(tmp_path: Path) -> None:
    source = folder(tmp_path / "w", {W: [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]})
    convert(source, tmp_path / "out", adapter=adapter(tmp_path / "a", a=[[1.0, 0.0, 5.0]], fan_in_fan_out=True))
    assert read_files(tmp_path / "out")[0][W].tolist() == [[3.0, 0.0], [0.0, 1.0], [10.0, 0.0]]


def test_a_merge_is_rounded_once(tmp_path: Path) -> None:
    """1 + 2^-8 lies between two bfloat16 numbers, a little more is nearer to the upper one."""
    source = folder(tmp_path / "w", {W: torch.ones(1, 1, dtype=torch.bfloat16)})
    delta = 2.0**-8 + 2.0**-20
    merged = adapter(tmp_path / "a", a=[[delta]], b=[[1.0]], lora_alpha=1)
    convert(source, tmp_path / "out", adapter=merged)
    out = read_files(tmp_path / "out")[0][W]
    assert (out.dtype, out.item()) == (torch.bfloat16, 1 + 2.0**-7)
    # rounding the product first would lose 2^-20 and then round the tie to even
    assert (torch.ones(1).bfloat16() + torch.tensor([delta]).bfloat16()).item() == 1.0
    convert(source, tmp_path / "wide", adapter=merged, dtype="float32")
    assert read_files(tmp_path / "wide")[0][W].item() == 1 + delta


@pytest.mark.parametrize("shards", [1, 2])
def test_without_options_every_bit_stays(shards: int, tmp_path: Path) -> None:
    source = folder(tmp_path / "w", shards=shards)
    (source / "tokenizer.json").write_text("{}")
    (source / "LICENSE").write_text("mine")
    (source / "pytorch_model.bin").write_text("not carried")
    convert(source, tmp_path / "out")
    assert same_bits(read_files(tmp_path / "out")[0], read_files(source)[0])
    assert read_files(tmp_path / "out")[1] == [{"format": "pt", "by": "me"}]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "LICENSE", "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert json.loads((tmp_path / "out/config.json").read_text()) == CONFIG


def test_a_dtype_is_written_and_named(tmp_path: Path) -> None:
    source = folder(tmp_path / "w", {W: torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), "n": [1, 2]})
    convert(source, tmp_path / "out", dtype="bfloat16")
    before, after = read_files(source)[0], read_files(tmp_path / "out")[0]
    assert torch.equal(after[W], before[W].bfloat16())
    assert (after["n"].dtype, after["n"].tolist()) == (torch.int64, [1, 2])
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_shards_have_at_most_the_size(tmp_path: Path) -> None:
    source = folder(tmp_path / "w", {f"t{i}": torch.full((4,), float(i)) for i in range(5)})
    convert(source, tmp_path / "out", shard_bytes=32)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 80
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert same_bits(read_files(tmp_path / "out")[0], read_files(source)[0])


@pytest.mark.parametrize(
    ("text", "count"),
    [("5GB", 5 * 10**9), ("512MiB", 512 << 20), ("1.5kB", 1500), ("7", 7), ("7B", 7), ("2 TB", 2 * 10**12)],
)
def test_sizes_in_words(text: str, count: int) -> None:
    assert bytes_of(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "GB", "5 apples", "5XB", "1e9", "0.1B", "nan", "9" * 30])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="is no size of a file"):
        bytes_of(text)


def test_an_adapter_of_other_modules_is_refused_with_all_of_them(tmp_path: Path) -> None:
    modules = ("model.layers.7.mlp.up_proj", "model.layers.8.mlp.up_proj", MODULE)
    config = AdapterConfig(r=1, lora_alpha=1, target_modules=("up_proj",))
    tensors = {key_of(m, "A"): torch.ones(1, 3) for m in modules} | {key_of(m, "B"): torch.ones(2, 1) for m in modules}
    write_adapter(tmp_path / "a", config, tensors)
    with pytest.raises(CheckpointError) as raised:
        convert(folder(tmp_path / "w"), tmp_path / "out", adapter=tmp_path / "a")
    words = str(raised.value)
    assert f"{tmp_path / 'a'} is no adapter of {tmp_path / 'w'}" in words
    assert all(f"there is no module {module!r}" in words for module in modules[:2])
    assert f"{MODULE!r} is [2, 2], the adapter is for [2, 3]" in words
    assert not (tmp_path / "out").exists()


def test_a_tied_head_cannot_be_changed_alone(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.eye(2), "lm_head.weight": torch.eye(2)}
    for stored in (tensors, {"model.embed_tokens.weight": torch.eye(2)}):
        source = folder(tmp_path / f"w{len(stored)}", stored, tie_word_embeddings=True)
        with pytest.raises(CheckpointError, match=r"'lm_head' is tied to 'model\.embed_tokens\.weight'"):
            convert(source, tmp_path / "out", adapter=adapter(tmp_path / f"a{len(stored)}", "lm_head"))


def test_a_merge_beyond_the_dtype_is_refused_and_the_old_folder_stays(tmp_path: Path) -> None:
    source = folder(tmp_path / "w", {W: torch.full((1, 1), 60000.0, dtype=torch.float16)})
    huge = adapter(tmp_path / "a", a=[[60000.0]], b=[[1.0]])
    convert(source, tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"with the adapter holds numbers beyond torch\.float16; write with another --dtype"
    ):
        convert(source, tmp_path / "out", adapter=huge)
    assert same_bits(read_files(tmp_path / "out")[0], read_files(source)[0])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    convert(source, tmp_path / "out", adapter=huge, dtype="float32")
    assert read_files(tmp_path / "out")[0][W].item() == 180000.0


def test_packed_weights_are_refused(tmp_path: Path) -> None:
    quantised = folder(tmp_path / "q", quantization_config={"quant_method": "fp8"})
    packed = folder(tmp_path / "p", {W: torch.eye(2).to(torch.float8_e4m3fn)})
    integers = folder(tmp_path / "i", {W: torch.eye(2).to(torch.int8)})
    merge = adapter(tmp_path / "a")
    for source in (quantised, packed):
        with pytest.raises(CheckpointError, match="plain"):
            convert(source, tmp_path / "out", dtype="float32")
    for source in (quantised, packed, integers):
        with pytest.raises(CheckpointError, match="plain"):
            convert(source, tmp_path / "out", adapter=merge)
        assert same_bits(read_files(convert(source, tmp_path / "out"))[0], read_files(source)[0])


def test_other_files_are_not_lost_and_a_folder_is_not_written_over_itself(tmp_path: Path) -> None:
    source = folder(tmp_path / "w")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("years")
    with pytest.raises(CheckpointError, match=r"holds thesis\.tex, which would be lost"):
        convert(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is the folder that is read"):
        convert(source, source)
    with pytest.raises(CheckpointError, match="is the folder that is read"):
        convert(source, tmp_path / "out" / ".." / "w")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, merge, out = folder(tmp_path / "w"), adapter(tmp_path / "a"), tmp_path / "out"
    given = ["convert", str(source), str(out), "--dtype", "bfloat16", "--shard-size", "8B", "--merge", str(merge)]
    assert command(given) == 0
    assert capsys.readouterr().out == f"{out}: 2 tensors in 2 files, with {merge} merged in.\n"
    assert read_files(out)[0][W].tolist() == [[3.0, 2.0], [0.0, 1.0]]
    assert main(command, ["convert", str(merge), str(out)]) == 2
    assert capsys.readouterr().err == f"error: {merge} has no config.json; a Hugging Face folder is needed\n"
