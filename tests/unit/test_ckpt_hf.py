"""Hugging Face folders: opened, loaded, saved, compared bit for bit with what was there."""

from __future__ import annotations

import itertools
import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_toys import LAYOUTS, raw, read_files, same_bits, small, state_dict, write_folder

from areno_fn import tree
from areno_fn.ckpt import hf
from areno_fn.ckpt.store import INDEX, SINGLE
from areno_fn.contracts.errors import CheckpointError, LayoutError
from areno_fn.contracts.layout import Iso, TensorSpec, concat, identity, rename, tie
from areno_fn.models.decoder import shapes

CONFIG = {"model_type": "llama", "dtype": "bfloat16", "rope_theta": 1e4, "note": "größer"}


def layout(family: str = "llama", head: bool = False, **changes: Any) -> Iso:
    return LAYOUTS[family](small(**changes), head_in_file=head)


def open_with(folder: Path, iso: Iso, dtype: torch.dtype = torch.float32, **options: Any) -> hf.HFFolder:
    return hf.open_folder(write_folder(folder, state_dict(iso, dtype), CONFIG, **options))


def refuse(call: Any, *words: str, kind: type[Exception] = CheckpointError) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("family", sorted(LAYOUTS))
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_then_save_gives_the_same_bits(family: str, shards: int, dtype: torch.dtype, tmp_path: Path) -> None:
    config = small(qkv_bias=True, o_bias=family != "qwen2", mlp_bias=family == "llama", qk_norm=family == "qwen3")
    iso = LAYOUTS[family](config, head_in_file=True)
    tensors = state_dict(iso, dtype, norms=torch.float32)
    source = hf.open_folder(write_folder(tmp_path / "a", tensors, CONFIG, shards=shards))
    params = hf.load(source, iso, like=shapes(config))
    assert type(params) is type(shapes(config))
    size = 2000 if shards > 1 else 10**9
    out = hf.save(tmp_path / "b", params, iso, source.config, source=source, shard_bytes=size)
    written, metadata = read_files(out)
    assert same_bits(written, tensors)
    assert metadata == [{"format": "pt"}] * len(metadata) and (len(metadata) > 1) == (shards > 1)
    assert json.loads((out / "config.json").read_text()) == CONFIG


def test_leaves_are_what_the_layout_makes_of_the_file(tmp_path: Path) -> None:
    iso = layout("qwen2", qkv_bias=True)
    folder = open_with(tmp_path / "a", iso, shards=2)
    assert same_bits(hf.load(folder, iso), iso(state_dict(iso)))


def test_leaves_own_their_memory(tmp_path: Path) -> None:
    """Nothing of a loaded model changes with the file."""
    iso = layout()
    folder = open_with(tmp_path / "a", iso)
    leaves = hf.load(folder, iso)
    with (tmp_path / "a" / SINGLE).open("r+b") as file:
        file.write(b"\0" * (tmp_path / "a" / SINGLE).stat().st_size)
    assert same_bits(leaves, iso(state_dict(iso)))


@pytest.mark.parametrize("shards", [1, 2])
def test_K1_K3_a_tied_model_without_a_head_in_the_file(shards: int, tmp_path: Path) -> None:
    config = small(tie_embeddings=True)
    iso = LAYOUTS["llama"](config, head_in_file=False)
    folder = open_with(tmp_path / "a", iso, shards=shards)
    params = hf.load(folder, iso, like=shapes(config))
    assert params.head is None and torch.equal(params.embed, state_dict(iso)["model.embed_tokens.weight"])
    hf.save(tmp_path / "b", params, iso, CONFIG, source=folder)
    written, _ = read_files(tmp_path / "b")
    assert written.keys() == folder.specs.keys() and "lm_head.weight" not in written


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_K4_four_cases_of_flag_and_file(tied: bool, present: bool, tmp_path: Path) -> None:
    config = small(tie_embeddings=tied)
    iso = LAYOUTS["llama"](config, head_in_file=present)
    tensors = state_dict(iso)
    if present and tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    folder = hf.open_folder(write_folder(tmp_path / "a", tensors, CONFIG))
    assert ("lm_head.weight" in folder) is present
    like = shapes(small(tie_embeddings=tied or not present))
    params = hf.load(folder, iso, like=like)
    head = params.embed if params.head is None else params.head
    expected = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    assert torch.equal(head, expected) and torch.equal(params.embed, tensors["model.embed_tokens.weight"])
    written, _ = read_files(hf.save(tmp_path / "b", params, iso, CONFIG, source=folder))
    assert same_bits(written, tensors)


def test_K1_a_tied_head_that_drifted_is_refused(tmp_path: Path) -> None:
    iso = layout(head=True, tie_embeddings=True)
    folder = open_with(tmp_path / "a", iso)  # two random tensors
    words = "'model.embed_tokens.weight' and 'lm_head.weight' are tied"
    refuse(lambda: hf.load(folder, iso), words, "their values differ", kind=LayoutError)


def test_K5_a_tied_pair_is_written_twice_and_read_as_one(tmp_path: Path) -> None:
    spec = TensorSpec((2, 2))
    iso = tie("t", ["a", "b"], spec)
    shared = torch.rand(2, 2)
    hf.save(tmp_path / "a", {"t": shared}, iso, CONFIG)
    written, _ = read_files(tmp_path / "a")
    assert same_bits(written, {"a": shared, "b": shared})
    assert same_bits(hf.load(hf.open_folder(tmp_path / "a"), iso), {"t": shared})


def test_K6_two_names_of_one_leaf_are_refused_when_the_layout_is_built() -> None:
    spec = TensorSpec((2, 2))
    words = "the target key 'head' is claimed by two parts"
    refuse(
        lambda: rename("lm_head.kernel", "head", spec) | rename("lm_head.weight", "head", spec), words, kind=LayoutError
    )


def test_K6_a_second_name_in_the_file_is_refused(tmp_path: Path) -> None:
    iso = layout(head=True)
    tensors = state_dict(iso)
    tensors["lm_head.kernel"] = tensors["lm_head.weight"].clone()
    folder = hf.open_folder(write_folder(tmp_path / "a", tensors, CONFIG))
    refuse(lambda: hf.load(folder, iso), "'lm_head.kernel' is not declared")


def test_K7_a_model_with_more_layers_than_the_file(tmp_path: Path) -> None:
    folder = open_with(tmp_path / "a", layout(num_layers=2))
    more = layout(num_layers=3)
    missing = [name for name in more.source if name.startswith("model.layers.2.")]
    assert len(missing) == 9
    refuse(lambda: hf.load(folder, more), str(folder.path), *(f"{name!r} is missing" for name in missing))


def test_every_tensor_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    folder = open_with(tmp_path / "a", layout(hidden_size=8))
    wide = layout("qwen3", qk_norm=True, num_layers=2, hidden_size=9)
    with pytest.raises(CheckpointError) as caught:
        hf.require_fit(folder, wide)
    assert str(caught.value).count(" is missing") == 4 and str(caught.value).count(", declared ") == 19 + 1
    assert "'model.norm.weight' is float32 [8], declared [9]" in str(caught.value)


def test_K9_format_pt_and_other_metadata_are_kept(tmp_path: Path) -> None:
    iso = layout()
    folder = open_with(tmp_path / "a", iso, metadata={"author": "someone", "format": "pt"})
    hf.save(tmp_path / "b", hf.load(folder, iso), iso, CONFIG, source=folder, metadata={"step": "7"})
    assert read_files(tmp_path / "b")[1] == [{"author": "someone", "format": "pt", "step": "7"}]


@pytest.mark.parametrize("metadata", [{}, {"format": "np"}])
def test_K9_format_pt_is_written_when_the_source_has_none(metadata: dict[str, str], tmp_path: Path) -> None:
    iso = layout()
    folder = open_with(tmp_path / "a", iso, metadata=metadata)
    hf.save(tmp_path / "b", hf.load(folder, iso), iso, CONFIG, source=folder)
    assert read_files(tmp_path / "b")[1] == [{"format": "pt"}]


def test_K15_a_leaf_with_strides_is_written_in_order(tmp_path: Path) -> None:
    iso = rename("w", "w", TensorSpec((3, 2)))
    hf.save(tmp_path / "a", {"w": torch.arange(6).view(2, 3).t()}, iso, CONFIG)
    written, _ = read_files(tmp_path / "a")
    assert written["w"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_parts_along_the_last_dimension(tmp_path: Path) -> None:
    """The parts of the leaf are not contiguous, neither when they are filled nor when they are written."""
    iso = concat({"a": TensorSpec((2, 1)), "b": TensorSpec((2, 3))}, "ab", dim=1)
    tensors = {"a": torch.rand(2, 1), "b": torch.rand(2, 3)}
    folder = hf.open_folder(write_folder(tmp_path / "a", tensors, CONFIG))
    leaves = hf.load(folder, iso)
    assert torch.equal(leaves["ab"], torch.cat(list(tensors.values()), 1))
    assert same_bits(read_files(hf.save(tmp_path / "b", leaves, iso, CONFIG, source=folder))[0], tensors)


# ------------------------------------------------------------------------------------------ dtype, progress


@pytest.mark.parametrize(("policy", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_dtype_that_is_asked_for(policy: hf.DtypePolicy, dtype: torch.dtype, tmp_path: Path) -> None:
    iso = layout() | rename("count", "count", TensorSpec((2,)))
    tensors = state_dict(layout(), torch.float16, norms=torch.float32) | {"count": torch.tensor([1, 2])}
    folder = hf.open_folder(write_folder(tmp_path / "a", tensors, CONFIG))
    leaves = hf.load(folder, iso, dtype=policy)
    expected = iso({n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()})
    assert same_bits(leaves, expected)
    written, _ = read_files(hf.save(tmp_path / "b", leaves, iso, CONFIG, source=folder, dtype=policy))
    assert {t.dtype for n, t in written.items() if n != "count"} == {dtype} and written["count"].tolist() == [1, 2]
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == policy


def test_source_dtype_comes_back_after_training_in_float32(tmp_path: Path) -> None:
    iso = layout()
    tensors = state_dict(iso, torch.bfloat16, norms=torch.float32)
    folder = hf.open_folder(write_folder(tmp_path / "a", tensors, CONFIG))
    params = hf.load(folder, iso, dtype="float32")
    assert {t.dtype for t in params.values()} == {torch.float32}
    written, _ = read_files(hf.save(tmp_path / "b", params, iso, CONFIG, source=folder))
    assert same_bits(written, tensors)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_the_dtype_of_the_configuration_follows_a_conversion(key: str, tmp_path: Path) -> None:
    iso = layout()
    hf.save(tmp_path / "a", iso(state_dict(iso)), iso, {key: "float32"}, dtype="bfloat16")
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == {key: "bfloat16"}


def test_joining_tensors_of_several_dtypes_needs_one_dtype(tmp_path: Path) -> None:
    iso = layout()
    tensors = state_dict(iso)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].to(torch.bfloat16)
    folder = hf.open_folder(write_folder(tmp_path / "a", tensors, CONFIG))
    refuse(lambda: hf.load(folder, iso), "load with one dtype", "'layers.1.qkv' from", f"{name!r} bfloat16 [12, 8]")
    assert hf.load(folder, iso, dtype="float32")["layers.1.qkv"].dtype is torch.float32


def test_a_tied_pair_of_two_dtypes_is_compared_in_the_one_asked_for(tmp_path: Path) -> None:
    iso = tie("t", ["a", "b"], TensorSpec((2,)))
    tensors = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}
    folder = hf.open_folder(write_folder(tmp_path / "a", tensors, CONFIG))
    refuse(lambda: hf.load(folder, iso), "load with one dtype")
    leaves = hf.load(folder, iso, dtype="float32")
    assert same_bits(leaves, {"t": tensors["a"]})
    assert same_bits(read_files(hf.save(tmp_path / "b", leaves, iso, CONFIG, source=folder))[0], tensors)


@pytest.mark.parametrize("tied", [True, False])
def test_progress_reaches_exactly_the_claimed_tensors(tied: bool, tmp_path: Path) -> None:
    iso = layout(head=True, tie_embeddings=tied)
    tensors = state_dict(iso)
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    folder = hf.open_folder(write_folder(tmp_path / "a", tensors, CONFIG, shards=2))
    told: list[tuple[int, int, int, int]] = []
    hf.load(folder, iso, progress=lambda *numbers: told.append(numbers))
    total = sum(t.numel() * 4 for t in tensors.values())
    assert told[0] == (0, len(tensors), 0, total) and told[-1] == (len(tensors), len(tensors), total, total)
    assert len(told) == len(iso.parts) + 1
    assert all(a[0] < b[0] and a[2] < b[2] for a, b in itertools.pairwise(told))


def test_a_tree_of_another_structure(tmp_path: Path) -> None:
    iso = layout()
    folder = open_with(tmp_path / "a", iso)
    call = lambda: hf.load(folder, iso, like=shapes(small()))  # noqa: E731
    refuse(call, "the leaves of the model do not fit the layout: 'head' is not declared", kind=LayoutError)
    wide = shapes(small(tie_embeddings=True, hidden_size=9))
    refuse(lambda: hf.load(folder, iso, like=wide), "'embed' is float32 [11, 9], declared [11, 8]", kind=LayoutError)


# --------------------------------------------------------------------------------------------------- opening


def test_what_a_folder_must_have(tmp_path: Path) -> None:
    refuse(
        lambda: hf.open_folder(tmp_path / "none"), f"{tmp_path / 'none'} is not there; a Hugging Face folder is needed"
    )
    (tmp_path / "file").write_text("")
    refuse(lambda: hf.open_folder(tmp_path / "file"), "is not a folder")
    (tmp_path / "empty").mkdir()
    refuse(lambda: hf.open_folder(tmp_path / "empty"), "has no config.json")
    (tmp_path / "empty" / "config.json").write_text("{}")
    refuse(lambda: hf.open_folder(tmp_path / "empty"), "has no weights")
    (tmp_path / "empty" / "pytorch_model.bin").write_text("")
    refuse(lambda: hf.open_folder(tmp_path / "empty"), "pytorch_model.bin; only safetensors are read")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds a JSON list"),
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        ("[" * 9999, "nested"),
    ],
)
def test_a_configuration_that_is_none(text: str, words: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", state_dict(layout()))
    (folder / "config.json").write_text(text)
    refuse(lambda: hf.open_folder(folder), str(folder / "config.json"), words)


def test_generation_config_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", state_dict(layout()))
    assert hf.open_folder(folder).generation == {}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert hf.open_folder(folder).generation == {"eos_token_id": [1, 2]}


def test_opening_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    iso = layout()
    path = write_folder(tmp_path / "a", state_dict(iso), shards=2)
    monkeypatch.setattr("areno_fn.ckpt.tensorfile.os.preadv", lambda *_: pytest.fail("a tensor was read"))
    folder = hf.open_folder(path)
    hf.require_fit(folder, iso)
    refuse(lambda: hf.load(folder, layout(num_layers=3)), "is missing")


# --------------------------------------------------------------------------------------------------- writing

ASSETS = {
    "generation_config.json": "{}", "tokenizer.json": "{}", "tokenizer_config.json": "{}", "special_tokens_map.json": "{}",
    "added_tokens.json": "{}", "vocab.json": "{}", "vocab.txt": "a", "merges.txt": "a b", "tokenizer.model": "\0",
    "qwen.tiktoken": "x", "chat_template.jinja": "{{ x }}", "chat_template.json": "{}", "LICENSE": "free", "LICENSE.txt": "free",
    "NOTICE": "n", "additional_chat_templates/tool.jinja": "{{ y }}",
}  # fmt: skip
LEFT = ("optimizer.pt", "training_args.bin", "pytorch_model.bin", "tokenizer.pkl", "consolidated.safetensors", "README.md",
        "scheduler.pth", "other.json", "modeling_x.py", "model.gguf", "pytorch_model.bin.index.json")  # fmt: skip


def with_assets(folder: Path) -> Path:
    (folder / "additional_chat_templates").mkdir()
    for name, text in ASSETS.items():
        (folder / name).write_text(text)
    for name in LEFT:
        (folder / name).write_text("x")
    (folder / "tokenizer_backup").mkdir()
    return folder


def names(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_what_belongs_to_the_model_is_carried_and_nothing_else(tmp_path: Path) -> None:
    iso = layout()
    path = with_assets(write_folder(tmp_path / "a", state_dict(iso), CONFIG))
    folder = hf.open_folder(path)
    out = hf.save(tmp_path / "b", hf.load(folder, iso), iso, CONFIG, source=folder, files={"tokenizer.json": b"[1]"})
    assert names(out) == set(ASSETS) | {"config.json", SINGLE}
    assert all((out / name).read_text() == text for name, text in ASSETS.items() if name != "tokenizer.json")
    assert (out / "tokenizer.json").read_text() == "[1]"


def test_a_carried_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    iso = layout()
    folder = open_with(tmp_path / "a", iso)
    (tmp_path / "secret").write_text("x")
    (tmp_path / "a" / "tokenizer.json").symlink_to(tmp_path / "secret")
    params = hf.load(folder, iso)
    refuse(lambda: hf.save(tmp_path / "b", params, iso, CONFIG, source=folder), "'tokenizer.json' is a link to")
    assert not (tmp_path / "b").exists()


def test_shards_and_their_index(tmp_path: Path) -> None:
    iso = layout(head=True)
    folder = hf.save(tmp_path / "a", iso(state_dict(iso)), iso, CONFIG, shard_bytes=1000)
    index = json.loads((folder / INDEX).read_text())
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    count = len(files)
    assert files == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] and count > 3
    assert sorted(set(index["weight_map"].values())) == files and index["weight_map"].keys() == iso.source.keys()
    assert index["metadata"] == {"total_size": sum(spec.numel * 4 for spec in iso.source.values())}
    opened = hf.open_folder(folder)
    for header in opened.store.files.values():
        assert sum(e.nbytes for e in header.entries.values()) <= 1000 or len(header.entries) == 1


def test_the_metadata_of_an_index_is_kept_and_its_size_is_exact(tmp_path: Path) -> None:
    iso = layout()
    path = write_folder(tmp_path / "a", state_dict(iso), CONFIG, shards=2)
    values = json.loads((path / INDEX).read_text())
    values["metadata"] = {"total_parameters": 5, "total_size": 1}
    (path / INDEX).write_text(json.dumps(values))
    folder = hf.open_folder(path)
    params = hf.load(folder, iso)
    out = hf.save(tmp_path / "b", params, iso, CONFIG, source=folder, dtype="bfloat16", shard_bytes=1000)
    total = 2 * sum(spec.numel for spec in iso.source.values())
    assert json.loads((out / INDEX).read_text())["metadata"] == {"total_parameters": 5, "total_size": total}


def test_a_layout_that_does_not_write_what_the_source_has(tmp_path: Path) -> None:
    folder = open_with(tmp_path / "a", layout())
    other = layout(head=True)
    params = other(state_dict(other))
    words = f"the layout does not write the tensors of {folder.path}: 'lm_head.weight' is not declared"
    refuse(lambda: hf.save(tmp_path / "b", params, other, CONFIG, source=folder), words)
    fewer = layout(num_layers=1)
    refuse(
        lambda: hf.save(tmp_path / "b", fewer(state_dict(fewer)), fewer, CONFIG, source=folder),
        "'model.layers.1.mlp.down_proj.weight' is missing",
    )
    wide = layout(vocab_size=12)
    refuse(
        lambda: hf.save(tmp_path / "b", wide(state_dict(wide)), wide, CONFIG, source=folder),
        "'model.embed_tokens.weight' is float32 [12, 8], declared float32 [11, 8]",
    )
    assert not (tmp_path / "b").exists()


def test_parameters_that_the_layout_does_not_take(tmp_path: Path) -> None:
    iso = layout()
    params = iso(state_dict(iso))
    del params["norm"]
    refuse(
        lambda: hf.save(tmp_path / "b", params, iso, CONFIG),
        "the parameters do not fit the layout: 'norm' is missing",
        kind=LayoutError,
    )
    refuse(
        lambda: hf.save(tmp_path / "b", iso(state_dict(iso)), iso, CONFIG, shard_bytes=0),
        "shard_bytes must be at least 1",
    )


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    iso = layout()
    params = iso(state_dict(iso))
    hf.save(tmp_path / "a", params, iso, CONFIG, shard_bytes=500, files={"tokenizer.json": b"{}"})
    hf.save(tmp_path / "a", params, iso, CONFIG)
    assert names(tmp_path) == {"a/config.json", f"a/{SINGLE}"}


@pytest.mark.parametrize(
    "name", ["notes.txt", "pytorch_model.bin", ".git/HEAD", "tokenizer_backup/tokenizer.json", "sub/"]
)
def test_a_folder_with_other_things_is_not_replaced(name: str, tmp_path: Path) -> None:
    iso = layout()
    params = iso(state_dict(iso))
    out = hf.save(tmp_path / "a", params, iso, CONFIG)
    target = out / name
    target.parent.mkdir(exist_ok=True)
    target.mkdir() if name.endswith("/") else target.write_text("mine")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    first = name.rstrip("/").split("/")[0]
    refuse(lambda: hf.save(out, params, iso, CONFIG), f"{out} holds {first}", "which would be lost")
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_exporting_over_the_source(tmp_path: Path) -> None:
    iso = layout()
    folder = open_with(tmp_path / "a", iso)
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    params = tree.map(lambda x: x + 1, hf.load(folder, iso))
    hf.save(tmp_path / "a", params, iso, CONFIG, source=folder)
    assert names(tmp_path / "a") == {"config.json", SINGLE, "tokenizer.json"}
    assert same_bits(hf.load(hf.open_folder(tmp_path / "a"), iso), params)


def test_a_link_to_the_folder_stays_a_link(tmp_path: Path) -> None:
    iso = layout()
    params = iso(state_dict(iso))
    (tmp_path / "big").mkdir()
    (tmp_path / "a").symlink_to(tmp_path / "big")
    hf.save(tmp_path / "a", params, iso, CONFIG)
    assert (tmp_path / "a").is_symlink() and names(tmp_path / "big") == {"config.json", SINGLE}


def test_a_file_in_the_way(tmp_path: Path) -> None:
    iso = layout()
    (tmp_path / "a").write_text("mine")
    refuse(
        lambda: hf.save(tmp_path / "a", iso(state_dict(iso)), iso, CONFIG), "is a file, where a folder is to be written"
    )
    assert (tmp_path / "a").read_text() == "mine"


def test_files_have_the_usual_permissions(tmp_path: Path) -> None:
    iso = layout()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "x").write_text("")
    out = hf.save(tmp_path / "a", iso(state_dict(iso)), iso, CONFIG)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in out.iterdir()}
    assert modes == {stat.S_IMODE((tmp_path / "plain" / "x").stat().st_mode)}
    assert out.stat().st_mode == (tmp_path / "plain").stat().st_mode


# ---------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("family", sorted(LAYOUTS))
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_of_transformers_goes_through_unchanged(family: str, tied: bool, tmp_path: Path) -> None:
    import transformers

    from areno_fn.models import family_of

    kind = getattr(transformers, f"{family.capitalize()}Config")
    config = kind(
        vocab_size=13, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1,
        **({} if family == "qwen2" else {"attention_bias": True}),
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # the biases and norms too
        torch.nn.init.normal_(parameter, generator=generator)
    model.save_pretrained(tmp_path / "a", max_shard_size="2KB" if tied else "1GB")
    folder = hf.open_folder(tmp_path / "a")
    ours = family_of(folder.config).config_from_hf(folder.config)
    iso = LAYOUTS[family](ours, head_in_file="lm_head.weight" in folder)
    params = hf.load(folder, iso, like=shapes(ours))
    assert torch.equal(
        params.layers[1].qkv[: ours.num_heads * ours.head_dim], model.model.layers[1].self_attn.q_proj.weight
    )
    hf.save(tmp_path / "b", params, iso, folder.config, source=folder, shard_bytes=2000 if tied else 10**9)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    ids = torch.arange(13)[None]
    with torch.no_grad():
        assert torch.equal(raw(back(ids).logits), raw(model.eval()(ids).logits))
    assert same_bits(dict(back.state_dict()), dict(model.state_dict()))


def test_messages_are_one_sentence_about_this_folder(tmp_path: Path) -> None:
    iso = identity({"a": TensorSpec((1,))})
    folder = hf.open_folder(write_folder(tmp_path / "a", {"b": torch.ones(1)}, CONFIG))
    words = f"{tmp_path / 'a'}: its tensors are not those of the model: 'a' is missing; 'b' is not declared"
    refuse(lambda: hf.load(folder, iso), words)
