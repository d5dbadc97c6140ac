"""Adapter folders: what is read, what is refused and by which name, scales by hand, and writing as the inverse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from areno_fn.ckpt import peft
from areno_fn.ckpt.header import read_header
from areno_fn.ckpt.peft import AdapterConfig, key_of, open_adapter, read_adapter, write_adapter
from areno_fn.ckpt.peft_config import config_from_json, config_to_json
from areno_fn.ckpt.tools.arguments import command
from areno_fn.ckpt.tools.verify import problems
from areno_fn.contracts.errors import CheckpointError

MODULE = "model.layers.0.self_attn.q_proj"


def config(**changes: Any) -> AdapterConfig:
    return AdapterConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ("q_proj",), **changes})


def matrices(module: str = MODULE, rank: int = 2) -> dict[str, torch.Tensor]:
    return {
        key_of(module, "A"): torch.arange(3.0 * rank).reshape(rank, 3),
        key_of(module, "B"): torch.arange(5.0 * rank).reshape(5, rank),
    }


def rewrite(folder: Path, **changes: Any) -> Path:
    path = folder / peft.CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", config(), matrices())


def test_what_is_written_is_read(folder: Path) -> None:
    adapter = read_adapter(folder)
    assert adapter.config == config()
    assert adapter.tensors.keys() == matrices().keys()
    assert all(torch.equal(adapter.tensors[key], tensor) for key, tensor in matrices().items())
    assert open_adapter(folder).modules == (MODULE,)


def test_the_file_is_one_that_the_safetensors_library_reads(folder: Path) -> None:
    assert load_file(folder / peft.WEIGHTS).keys() == matrices().keys()
    assert open_adapter(folder).header.metadata == {"format": "pt"}


def test_an_adapter_of_a_pipeline_is_read_from_the_file_of_diffusers_alone(tmp_path: Path) -> None:
    both = write_adapter(tmp_path / "both", config(use_rslora=True), matrices(), "transformer")
    alone = tmp_path / "alone"
    alone.mkdir()
    (both / peft.DIFFUSERS).rename(alone / peft.DIFFUSERS)
    assert load_file(alone / peft.DIFFUSERS).keys() == {
        f"transformer.{MODULE}.lora_A.weight",
        f"transformer.{MODULE}.lora_B.weight",
    }
    for folder in (both, alone):
        adapter = read_adapter(folder)
        assert adapter.config == config(use_rslora=True, target_modules=(MODULE,))
        assert all(torch.equal(adapter.tensors[key], tensor) for key, tensor in matrices().items())
        assert not problems(folder)


def test_a_file_of_diffusers_that_does_not_say_its_scale_or_is_of_several_parts_is_refused(tmp_path: Path) -> None:
    def refused(metadata: dict[str, str], part: str = "transformer") -> str:
        tensors = {key.replace("base_model.model", part): tensor for key, tensor in matrices().items()}
        save_file(tensors, tmp_path / peft.DIFFUSERS, metadata=metadata)
        with pytest.raises(CheckpointError) as caught:
            read_adapter(tmp_path)
        return str(caught.value)

    said = {f"transformer.{name}": value for name, value in config_to_json(config()).items()}
    assert "no lora_adapter_metadata in its metadata" in refused({"format": "pt"})
    assert "is a JSON list, it must be an object" in refused({"lora_adapter_metadata": "[]"})
    assert "adapts transformer, unet" in refused({"lora_adapter_metadata": json.dumps(said)}, "unet")
    dora = {**said, "transformer.use_dora": True}
    assert "'use_dora' is True" in refused({"lora_adapter_metadata": json.dumps(dora)})


def both(folder: Path, **changes: Any) -> Path:
    """An adapter of a pipeline in its two files."""
    return write_adapter(folder, config(**changes), matrices(), "transformer")


def rewritten(folder: Path, **changes: torch.Tensor | None) -> None:
    """Diffusers' file with other matrices of the module, by their sides; None leaves one out."""
    file = folder / peft.DIFFUSERS
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    for side, tensor in changes.items():
        key = f"transformer.{MODULE}.lora_{side}.weight"
        tensors.pop(key) if tensor is None else tensors.update({key: tensor})
    save_file(tensors, file, metadata=metadata)


def test_both_files_of_an_adapter_are_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = both(tmp_path / "adapter")
    assert problems(folder) == [] and command(["verify", str(folder), "--values"]) == 0
    said = "2 tensors in 1 file, and the same in pytorch_lora_weights.safetensors, every number finite."
    assert capsys.readouterr().out == f"OK {folder}: {said}\n"
    (folder / peft.DIFFUSERS).unlink()
    assert problems(folder) == [] and command(["verify", str(folder)]) == 0
    assert capsys.readouterr().out == f"OK {folder}: 2 tensors in 1 file.\n"


def test_a_number_that_differs_between_the_files_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = both(tmp_path / "adapter")
    changed = torch.arange(10.0).reshape(5, 2)
    changed[4, 1] += 2**-10
    changed[0, 0] = -0.0  # as a number it is the same, as bits it is not
    rewritten(folder, B=changed)
    key = key_of(MODULE, "B")
    differ = f"2 of 10 numbers of what PEFT calls {key!r} differ from those of adapter_model.safetensors"
    sentence = f"{folder / peft.DIFFUSERS}: {differ}"
    assert problems(folder) == [sentence]
    assert command(["verify", str(folder)]) == 1
    assert capsys.readouterr().out == f"problem: {sentence}\n{folder}: 1 problem.\n"


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("place", [0, -1])
def test_a_flipped_bit_in_either_file_is_a_problem(tmp_path: Path, side: str, place: int) -> None:
    for name in (peft.WEIGHTS, peft.DIFFUSERS):
        folder = both(tmp_path / f"{name}-{side}{place}")
        header = read_header(folder / name)
        (entry,) = (entry for key, entry in header.entries.items() if f"lora_{side}" in key)
        data = bytearray((folder / name).read_bytes())
        data[entry.start if place == 0 else entry.stop - 1] ^= 1
        (folder / name).write_bytes(data)
        (found,) = problems(folder)
        assert "1 of" in found and "numbers" in found and f"lora_{side}" in found


def test_a_file_that_lacks_a_module_or_a_side_or_is_of_another_shape_or_dtype_is_a_problem(tmp_path: Path) -> None:
    two = {**matrices(), **matrices("model.layers.1.self_attn.q_proj")}
    folder = write_adapter(tmp_path / "two", config(), two, "transformer")
    once = both(tmp_path / "once")
    shutil.copy(once / peft.DIFFUSERS, folder / peft.DIFFUSERS)
    assert problems(folder) == [
        f"{folder / peft.DIFFUSERS} lacks 'model.layers.1.self_attn.q_proj', which adapter_model.safetensors adapts"
    ]
    assert open_adapter(folder).modules and problems(once) == []
    rewritten(once, A=None)
    (found,) = problems(once)
    assert f"{key_of(MODULE, 'A')!r} is missing" in found
    wide = both(tmp_path / "wide")
    rewritten(wide, B=torch.zeros(7, 2))
    assert problems(wide) == [
        f"{wide / peft.DIFFUSERS}: what PEFT calls {key_of(MODULE, 'B')!r} is float32 [7, 2], but for PEFT float32 [5, 2]"
    ]
    half = both(tmp_path / "half")
    rewritten(half, B=matrices()[key_of(MODULE, "B")].bfloat16())
    (found,) = problems(half)
    assert "is bfloat16 [5, 2], but for PEFT float32 [5, 2]" in found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_alpha": 8}, "has alpha 8, but for PEFT it is 4"),
        ({"use_rslora": True}, "has scale 2.82843, but for PEFT it is 2"),
        ({"alpha_pattern": {"q_proj": 1}}, "has alpha 1, but for PEFT it is 4"),
    ],
)
def test_a_scale_that_differs_between_the_files_is_a_problem(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder, other = both(tmp_path / "adapter"), both(tmp_path / "other", **changes)
    shutil.copy(other / peft.DIFFUSERS, folder / peft.DIFFUSERS)
    assert problems(folder) == [f"{folder / peft.DIFFUSERS}: {MODULE!r} {said}"]


def test_a_damaged_or_silent_file_of_diffusers_beside_the_others_is_a_problem(tmp_path: Path) -> None:
    folder = both(tmp_path / "adapter")
    file = folder / peft.DIFFUSERS
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    (found,) = problems(folder)
    assert str(file) in found
    file.write_bytes(b"")
    assert len(problems(folder)) == 1
    tensors = {f"transformer.{key.removeprefix('base_model.model.')}": tensor for key, tensor in matrices().items()}
    save_file(tensors, file, metadata={"format": "pt"})
    (found,) = problems(folder)
    assert "has no lora_adapter_metadata" in found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (peft.DIFFUSERS, "pytorch_lora_weights.safetensors cannot be read (No such file or directory)"),
        (peft.WEIGHTS, "has no adapter_model.safetensors"),
    ],
)
def test_a_link_to_nothing_in_the_place_of_either_file_is_a_problem(name: str, words: str, tmp_path: Path) -> None:
    folder = both(tmp_path / "adapter")
    (folder / name).unlink()
    (folder / name).symlink_to("gone")
    (found,) = problems(folder)
    assert words in found


def test_keys_are_those_of_peft() -> None:
    assert key_of("model.layers.0.mlp.up_proj", "B") == "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"


def test_a_transposed_view_is_written_row_by_row(tmp_path: Path) -> None:
    tensors = {key: tensor.t().contiguous().t() for key, tensor in matrices().items()}
    written = read_adapter(write_adapter(tmp_path / "a", config(), tensors))
    assert all(torch.equal(written.tensors[key], tensor) for key, tensor in matrices().items())


def test_scales_worked_by_hand() -> None:
    assert config(r=8, lora_alpha=16).scale(MODULE) == 2.0
    assert config(r=16, lora_alpha=8, use_rslora=True).scale(MODULE) == 2.0
    patterned = config(
        rank_pattern={"layers.0.self_attn.q_proj": 4}, alpha_pattern={"q_proj": 12, "self_attn.q_proj": 1}
    )
    assert (patterned.rank(MODULE), patterned.alpha(MODULE), patterned.scale(MODULE)) == (4, 12, 3.0)
    assert patterned.scale("model.layers.1.self_attn.k_proj") == 2.0


@pytest.mark.parametrize(
    ("pattern", "module", "fits"),
    [
        ("q_proj", "model.q_proj", True),
        ("q_proj", "q_proj", True),
        ("q_proj", "model.xq_proj", False),
        ("q_proj", "model.q_proj.inner", False),
        (r"layers\.1\.q_proj", "model.layers.11.q_proj", False),
        (r"layers\.1\.q_proj", "model.layers.1.q_proj", True),
        ("^model.q_proj", "model.q_proj", True),
        ("^q_proj", "model.q_proj", False),
        ("k_proj|q_proj", "model.q_proj", True),
    ],
)
def test_a_pattern_fits_the_end_of_a_name(pattern: str, module: str, fits: bool) -> None:
    assert config(rank_pattern={pattern: 7}).rank(module) == (7 if fits else 2)


@pytest.mark.parametrize("pattern", ["(a|a)(a|a)", "(a+)+", ".*", "a{2}", "[ab]", "\\", "", "a" * 1001])
def test_a_pattern_that_could_take_long_or_is_none_is_refused(pattern: str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="'alpha_pattern' is .* patterns without groups and repetitions"):
        read_adapter(rewrite(folder, alpha_pattern={pattern: 1}))


REFUSED = {
    "use_dora": True,
    "use_qalora": True,
    "use_bdlora": True,
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "layers_to_transform": 0,
    "layers_pattern": "layers",
    "exclude_modules": ["k_proj"],
    "layer_replication": [[0, 4]],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "trainable_token_indices": [1],
    "loftq_config": {"loftq_bits": 4},
    "alora_invocation_tokens": [1, 2],
    "bias": "lora_only",
    "peft_type": "IA3",
    "init_lora_weights": "pissa_niter_4",
    "an_option_of_tomorrow": {"a": 1},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=f"adapter_config.json cannot be used: '{name}' is .*, but "):
        read_adapter(rewrite(folder, **{name: REFUSED[name]}))


def test_everything_that_is_not_supported_is_listed_at_once(folder: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        read_adapter(rewrite(folder, **REFUSED, r=0))
    assert all(repr(name) in str(raised.value) for name in (*REFUSED, "r"))


def test_options_that_are_off_are_no_reason_to_refuse(folder: Path) -> None:
    off = {name: None for name in REFUSED if name not in ("peft_type", "bias")} | {"an_option_of_tomorrow": False}
    assert read_adapter(rewrite(folder, **off, peft_version="9.9", auto_mapping={"a": "b"})).config == config()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("r", 2.0), ("r", True), ("r", -1), ("lora_alpha", "4"), ("lora_alpha", float("nan")), ("lora_alpha", 0),
        ("lora_alpha", 10**400), ("target_modules", []), ("target_modules", [1]), ("target_modules", {"a": 1}),
        ("use_rslora", 1), ("fan_in_fan_out", "no"), ("rank_pattern", {"a": 0}), ("rank_pattern", ["a"]),
        ("alpha_pattern", {"a": None}), ("lora_dropout", 1), ("base_model_name_or_path", 3), ("inference_mode", "y"),
    ],
)  # fmt: skip
def test_a_field_of_a_wrong_type_or_value_is_named(name: str, value: Any, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=f"'{name}' is .*, it must be "):
        read_adapter(rewrite(folder, **{name: value}))
    given = tuple(value) if isinstance(value, list) else value
    with pytest.raises(CheckpointError, match=f"'{name}' is .*, it must be "):
        config(**{name: given})


@pytest.mark.parametrize("name", ["r", "lora_alpha", "target_modules", "peft_type"])
def test_a_missing_field_is_named(name: str, folder: Path) -> None:
    values = json.loads((folder / peft.CONFIG).read_text())
    del values[name]
    (folder / peft.CONFIG).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
        read_adapter(folder)


A, B = key_of(MODULE, "A"), key_of(MODULE, "B")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({B: None}, f"'{B}' is missing"),
        ({A: torch.zeros(3, 3)}, rf"'{A}' is float32 \[3, 3\], it must be a floating \[2, in\]"),
        ({B: torch.zeros(2, 5)}, rf"'{B}' is float32 \[2, 5\], it must be a floating \[out, 2\]"),
        ({B: torch.zeros(5, 2, 1)}, "it must be a floating"),
        ({A: torch.zeros(2, 3, dtype=torch.int64)}, "it must be a floating"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2, 3)}, "lora_embedding_A' is none of"),
        ({"base_model.model.lm_head.weight": torch.zeros(2, 3)}, "'base_model.model.lm_head.weight' is none of"),
        ({"model.q_proj.lora_A.weight": torch.zeros(2, 3)}, "'model.q_proj.lora_A.weight' is none of"),
        (matrices("model.layers.0.mlp.up_proj"), "'model.layers.0.mlp.up_proj' is not among the target_modules q_proj"),
    ],
)  # fmt: skip
def test_tensors_that_are_none_of_the_adapter_are_refused(
    changes: dict[str, torch.Tensor | None], words: str, folder: Path, tmp_path: Path
) -> None:
    tensors = {key: tensor for key, tensor in {**matrices(), **changes}.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=words):
        write_adapter(tmp_path / "new", config(), tensors)
    assert not (tmp_path / "new").exists()
    save_file(tensors, folder / peft.WEIGHTS)
    with pytest.raises(CheckpointError, match=words):
        read_adapter(folder)


def test_an_adapter_without_a_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no tensor in it"):
        write_adapter(tmp_path / "new", config(), {})


def test_only_safetensors_are_read(folder: Path) -> None:
    (folder / peft.WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"only safetensors are read, so convert adapter_model\.bin first"):
        read_adapter(folder)


def test_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (folder / peft.WEIGHTS).rename(tmp_path / "elsewhere.safetensors")
    (folder / peft.WEIGHTS).symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="outside the folder"):
        read_adapter(folder)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_text(""), lambda path: path.mkdir()])
def test_a_place_that_holds_no_adapter_is_a_sentence(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"an adapter is needed|has no adapter_config\.json"):
        read_adapter(tmp_path / "x")


@pytest.mark.parametrize("text", ["[]", "{", '{"r": 1, "r": 2}', "[" * 100_000])
def test_a_damaged_configuration_is_a_sentence(text: str, folder: Path) -> None:
    (folder / peft.CONFIG).write_text(text)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read_adapter(folder)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    data = (folder / peft.WEIGHTS).read_bytes()
    (folder / peft.WEIGHTS).write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        read_adapter(folder)


def test_an_adapter_is_replaced_but_other_files_are_not_lost(folder: Path) -> None:
    write_adapter(folder, config(lora_alpha=8), matrices())
    assert read_adapter(folder).config.lora_alpha == 8
    (folder / "README.md").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds README\.md, which would be lost"):
        write_adapter(folder, config(), matrices())
    assert read_adapter(folder).config.lora_alpha == 8


names = st.from_regex(r"[a-z_]{1,8}(\.[a-z0-9_]{1,8}){0,2}", fullmatch=True)
alphas = st.integers(1, 512) | st.floats(0.125, 64, allow_nan=False)


@given(
    st.builds(
        AdapterConfig,
        r=st.integers(1, 512),
        lora_alpha=alphas,
        target_modules=st.lists(names, min_size=1, max_size=4).map(tuple) | st.just(r".*\.q_proj"),
        use_rslora=st.booleans(),
        fan_in_fan_out=st.booleans(),
        rank_pattern=st.dictionaries(names, st.integers(1, 64), max_size=2),
        alpha_pattern=st.dictionaries(names, alphas, max_size=2),
        lora_dropout=st.floats(0, 0.9),
        base_model_name_or_path=st.none() | st.text(max_size=9),
        revision=st.none() | st.text(max_size=9),
        task_type=st.none() | st.just("CAUSAL_LM"),
        inference_mode=st.booleans(),
    )
)
def test_a_configuration_survives_the_way_through_json(made: AdapterConfig) -> None:
    assert config_from_json(json.loads(json.dumps(config_to_json(made))), "x") == made
