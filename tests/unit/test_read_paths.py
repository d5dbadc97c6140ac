"""What a run reads must not lie where it deletes or writes: every field that names a path, links included."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from e2e import tiny

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import EMA, RunSpec
from areno_fn.engine.outputs import OWN
from areno_fn.engine.read_paths import require_apart

HF = {"kind": "hf", "path": "SOURCE"}
PPO = {"kind": "ppo", "sampling": {"max_tokens": 4}, "critic": {"path": "SOURCE"}}
FIELDS: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "model.path": (("model",), HF),
    "tokenizer.path": (("tokenizer",), HF),
    "finetune.adapter": (("finetune",), {"kind": "lora", "adapter": "SOURCE"}),
    "phases.sft.data.0.path": (("phases", 0, "data"), [{"kind": "jsonl", "path": "SOURCE"}]),
    "phases.sft.data.1.path": (
        ("phases", 0, "data"),
        [{"kind": "parquet", "path": "apart"}, {"kind": "hf", "path": "SOURCE"}],
    ),
    "phases.grpo.rewards.0.path": (("phases", 1, "rewards"), [{"kind": "model", "path": "SOURCE"}]),
    "phases.grpo.algorithm.critic.path": (("phases", 1, "algorithm"), PPO),
    "evaluation.data.0.path": (("evaluation", "data"), [{"kind": "parquet", "path": "SOURCE"}]),
    "evaluation.rewards.0.path": (("evaluation", "rewards"), [{"kind": "model", "path": "SOURCE"}]),
}


def spec(out: Path, source: Path | str, field: str = "model.path", **more: Any) -> RunSpec:
    plain: Any = tomllib.loads(tiny.SPEC) | {"out": str(out)} | more
    way, value = FIELDS[field]
    inner = plain
    for part in way[:-1]:
        inner = inner[part]
    inner[way[-1]] = msgspec.json.decode(msgspec.json.encode(value).replace(b"SOURCE", str(source).encode()))
    return msgspec.convert(plain, RunSpec)


def refusal(made: RunSpec, *, overwrite: bool) -> str:
    with pytest.raises(SpecError) as caught:
        require_apart(made, overwrite=overwrite)
    return str(caught.value)


@pytest.mark.parametrize("field", FIELDS)
def test_a_source_that_would_be_deleted_is_named_by_its_field(field: str, tmp_path: Path) -> None:
    source = tmp_path / "out" / "critic" / "deep"
    assert refusal(spec(tmp_path / "out", source, field), overwrite=True) == (
        f"{field}: {source} lies in {tmp_path}/out/critic, which --overwrite deletes; move it elsewhere, or choose another out"
    )
    require_apart(spec(tmp_path / "other", source, field), overwrite=True)
    require_apart(spec(tmp_path / "out", tmp_path / "out" / "mine" / "critic", field), overwrite=True)


@pytest.mark.parametrize("name", OWN)
def test_all_that_is_deleted_counts(name: str, tmp_path: Path) -> None:
    assert f"{tmp_path}/out/{name}, which --overwrite deletes" in refusal(
        spec(tmp_path / "out", tmp_path / "out" / name), overwrite=True
    )


def test_what_a_run_writes_counts_by_its_specification(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert refusal(spec(out, out / "export"), overwrite=False) == (
        f"model.path: {out}/export lies in {out}/export, which this run writes itself; move it elsewhere, or choose another out"
    )
    for name, asked in (
        ("critic", {"export": {"roles": ["critic"]}}),
        ("adapter", {"finetune": {"kind": "lora"}}),
    ):
        require_apart(spec(out, out / name), overwrite=False)
        assert "writes itself" in refusal(spec(out, out / name, **asked), overwrite=False)
    averaging = spec(out, out / "export_ema")
    require_apart(averaging, overwrite=False)
    last = msgspec.structs.replace(averaging.phases[-1], ema=EMA())
    assert "writes itself" in refusal(
        msgspec.structs.replace(averaging, phases=[averaging.phases[0], last]), overwrite=False
    )


def test_links_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to what is deleted, a link among what is deleted, links to single files, and a linked output folder."""
    out, apart = tmp_path / "out", tmp_path / "apart"
    (out / "export").mkdir(parents=True)
    (out / "export" / "model.safetensors").write_text("x")
    apart.mkdir()
    (apart / "config.json").write_text("x")
    require_apart(spec(out, apart), overwrite=True)
    (tmp_path / "to").symlink_to(out / "export")
    assert "lies in" in refusal(spec(out, tmp_path / "to"), overwrite=True)
    (out / "critic").symlink_to(apart)
    assert "/critic, which" in refusal(spec(out, out / "critic"), overwrite=True)
    (tmp_path / "linked").symlink_to(out)
    assert "lies in" in refusal(spec(tmp_path / "linked", out / "export"), overwrite=True)
    (apart / "model.safetensors").symlink_to(out / "export" / "model.safetensors")
    assert "/export, which" in refusal(spec(out, apart), overwrite=True)
    monkeypatch.chdir(tmp_path)
    assert "lies in" in refusal(spec(Path("out"), "apart/../out/export/"), overwrite=True)


def test_a_source_that_can_be_no_path_is_left_to_who_opens_it(tmp_path: Path) -> None:
    require_apart(spec(tmp_path, "x" * 300), overwrite=True)
    require_apart(spec(tmp_path, "apart", name="run"), overwrite=True)
