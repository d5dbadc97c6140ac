"""Tensors of a file that a layout leaves alone, and the files beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_toys import read_files, same_bits, write_folder

from areno_fn.ckpt import hf
from areno_fn.ckpt.store import INDEX, SINGLE
from areno_fn.contracts.errors import CheckpointError
from areno_fn.contracts.layout import Iso, TensorSpec, concat, rename

CONFIG = {"model_type": "toy"}
VISUAL = ("model.visual.*", "mtp.*")


def layout() -> Iso:
    return concat({"q": TensorSpec((2, 3)), "k": TensorSpec((1, 3))}, "qk") | rename("w", "w", TensorSpec((4,)))


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    text = {name: torch.randn(spec.shape, generator=generator) for name, spec in layout().source.items()}
    return {
        **text,
        "model.visual.patch.weight": torch.randn(3, 2, generator=generator).to(torch.bfloat16),
        "model.visual.blocks.0.bias": torch.randn(5, generator=generator).to(torch.float16),
        "mtp.fc.weight": torch.randn(2, 2, generator=generator),
    }


def opened(folder: Path, shards: int = 1) -> hf.HFFolder:
    return hf.open_folder(write_folder(folder, tensors(), CONFIG, shards=shards))


def refuse(call: Any, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shards", [1, 4])
def test_what_is_left_out_is_neither_read_nor_counted(shards: int, tmp_path: Path) -> None:
    folder, told = opened(tmp_path / "a", shards), []
    loaded = hf.load(folder, layout(), left_out=VISUAL, progress=lambda *numbers: told.append(numbers))
    assert same_bits(loaded, layout()({name: tensors()[name] for name in layout().source}))
    nbytes = 4 * (6 + 3 + 4)
    assert told[0] == (0, 3, 0, nbytes) and told[-1] == (3, 3, nbytes, nbytes)


def test_what_is_not_declared_is_refused(tmp_path: Path) -> None:
    folder = opened(tmp_path / "a")
    refuse(lambda: hf.load(folder, layout()), "'model.visual.patch.weight' is not declared", "'mtp.fc.weight' is not")
    refuse(lambda: hf.require_fit(folder, layout(), left_out=["mtp.*"]), "'model.visual.blocks.0.bias' is not declared")
    hf.require_fit(folder, layout(), left_out=VISUAL)


@pytest.mark.parametrize("pattern", ["w", "*", "q*"])
def test_a_pattern_that_matches_what_is_claimed(pattern: str, tmp_path: Path) -> None:
    folder = opened(tmp_path / "a")
    name = {"w": "w", "*": "q", "q*": "q"}[pattern]
    words = f"what is left out must not be claimed by the layout, but {pattern!r} matches {name!r}"
    refuse(lambda: hf.require_fit(folder, layout(), left_out=[pattern, *VISUAL]), words)
    params = layout()({n: tensors()[n] for n in layout().source})
    refuse(lambda: hf.save(tmp_path / "b", params, layout(), CONFIG, left_out=[pattern]), words)
    assert not (tmp_path / "b").exists()


def test_a_pattern_that_matches_nothing_is_none_of_the_files_business(tmp_path: Path) -> None:
    folder = opened(tmp_path / "a")
    hf.require_fit(folder, layout(), left_out=[*VISUAL, "audio.*"])


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("dtype", ["source", "bfloat16"])
def test_it_is_passed_through_as_it_is(shards: int, dtype: hf.DtypePolicy, tmp_path: Path) -> None:
    """Whatever becomes of the others, these keep their dtype and bits, and the index counts them."""
    folder = opened(tmp_path / "a", shards)
    loaded = hf.load(folder, layout(), left_out=VISUAL)
    size = 30 if shards > 1 else 10**9
    out = hf.save(
        tmp_path / "b", loaded, layout(), CONFIG, source=folder, dtype=dtype, left_out=VISUAL, shard_bytes=size
    )
    written, _ = read_files(out)
    expected = {
        name: tensor.to(torch.bfloat16) if dtype == "bfloat16" and name in layout().source else tensor
        for name, tensor in tensors().items()
    }
    assert same_bits(written, expected)
    if shards > 1:
        index = json.loads((out / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
        assert index["weight_map"].keys() == expected.keys()
    again = hf.load(hf.open_folder(out), layout(), left_out=VISUAL)
    assert {name: leaf.shape for name, leaf in again.items()} == {name: leaf.shape for name, leaf in loaded.items()}


def test_it_can_be_dropped(tmp_path: Path) -> None:
    folder = opened(tmp_path / "a")
    loaded = hf.load(folder, layout(), left_out=VISUAL)
    out = hf.save(tmp_path / "b", loaded, layout(), CONFIG, source=folder, left_out=VISUAL, passthrough=False)
    assert same_bits(read_files(out)[0], {name: tensors()[name] for name in layout().source})
    hf.require_fit(hf.open_folder(out), layout())


def test_over_the_source_it_stays(tmp_path: Path) -> None:
    folder = opened(tmp_path / "a", 3)
    loaded = {name: leaf + 1 for name, leaf in hf.load(folder, layout(), left_out=VISUAL).items()}
    hf.save(tmp_path / "a", loaded, layout(), CONFIG, source=folder, left_out=VISUAL)
    written, _ = read_files(tmp_path / "a")
    assert same_bits(written, {n: t + 1 if n in layout().source else t for n, t in tensors().items()})
    assert (tmp_path / "a" / SINGLE).exists() and not (tmp_path / "a" / INDEX).exists()


def test_a_source_that_is_cut_short_while_it_is_passed_through(tmp_path: Path) -> None:
    folder = opened(tmp_path / "a")
    loaded = hf.load(folder, layout(), left_out=VISUAL)
    with (tmp_path / "a" / SINGLE).open("r+b") as file:
        file.truncate(200)
    call = lambda: hf.save(tmp_path / "b", loaded, layout(), CONFIG, source=folder, left_out=VISUAL)  # noqa: E731
    refuse(call, "bytes when its header was read, now it has 200")
    assert not (tmp_path / "b").exists()


def test_a_layout_that_writes_less_than_the_source_must_say_what_it_leaves_out(tmp_path: Path) -> None:
    folder = opened(tmp_path / "a")
    loaded = hf.load(folder, layout(), left_out=VISUAL)
    refuse(
        lambda: hf.save(tmp_path / "b", loaded, layout(), CONFIG, source=folder, left_out=["mtp.*"]),
        f"the layout does not write the tensors of {folder.path}",
        "'model.visual.patch.weight' is missing",
    )


# ------------------------------------------------------------------------------------------------ beside the weights


def saved(folder: Path, config: dict[str, Any], names: list[str], out: Path) -> set[str]:
    for name in names:
        (folder / name).write_text(name)
    (folder / "config.json").write_text(json.dumps(config))
    source = hf.open_folder(folder)
    loaded = hf.load(source, layout(), left_out=VISUAL)
    hf.save(out, loaded, layout(), config, source=source, left_out=VISUAL)
    return {path.name for path in out.iterdir()} - {"config.json", SINGLE}


PROCESSORS = ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
              "image_processor_config.json", "audio_tokenizer_config.json"]  # fmt: skip
CODE = ["modeling_toy.py", "configuration_toy.py"]


def test_configurations_of_processors_are_carried_and_the_readme_is_not(tmp_path: Path) -> None:
    opened(tmp_path / "a")
    names = [*PROCESSORS, *CODE, "README.md", "trainer_state.json"]
    assert saved(tmp_path / "a", CONFIG, names, tmp_path / "b") == set(PROCESSORS)


def test_code_is_carried_where_the_configuration_names_it(tmp_path: Path) -> None:
    opened(tmp_path / "a")
    config = {**CONFIG, "auto_map": {"AutoConfig": "configuration_toy.ToyConfig"}}
    assert saved(tmp_path / "a", config, CODE, tmp_path / "b") == set(CODE)
    source = hf.open_folder(tmp_path / "a")
    params = hf.load(source, layout(), left_out=VISUAL)
    hf.save(tmp_path / "b", params, layout(), config, source=source, left_out=VISUAL)  # over a folder with code
    (tmp_path / "b" / "mine.py").write_text("x")
    with pytest.raises(CheckpointError, match="holds mine.py, which would be lost"):
        hf.save(tmp_path / "b", params, layout(), config, source=source, left_out=VISUAL)
