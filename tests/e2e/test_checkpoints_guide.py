"""Every command that docs/checkpoints.md shows is run, and prints what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from ckpt_toys import LAYOUTS, read_files, small, state_dict, write_folder
from unit.test_ckpt_resume import IDENTITY, state

from areno_fn.ckpt.peft import AdapterConfig, key_of, write_adapter
from areno_fn.ckpt.resume import save_state
from areno_fn.ckpt.tools.arguments import command
from areno_fn.contracts.identity import ACCEPTABLE, NEVER

PAGE = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```bash\n(python -m areno_fn\.ckpt .*?)```\n(?:\n```text\n(.*?)```\n)?", PAGE, flags=re.DOTALL)
MODULE = "model.layers.1.mlp.up_proj"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder from which the page's commands are given: BASE, and what a run left in out/mine."""
    monkeypatch.chdir(tmp_path)
    tensors = state_dict(LAYOUTS["llama"](small(), head_in_file=False), torch.bfloat16)
    config = {"model_type": "llama", "tie_word_embeddings": True, "hidden_size": 8, "num_hidden_layers": 2}
    write_folder(tmp_path / "BASE", tensors, {**config, "dtype": "bfloat16"})
    trained = {
        **tensors,
        f"{MODULE}.weight": tensors[f"{MODULE}.weight"] * 2,
        "model.norm.weight": torch.zeros(8).bfloat16(),
    }
    write_folder(tmp_path / "out/mine/export", trained, {**config, "dtype": "bfloat16"})
    adapter = {key_of(MODULE, "A"): torch.ones(2, 8), key_of(MODULE, "B"): torch.ones(12, 2)}
    write_adapter(tmp_path / "out/mine/adapter", AdapterConfig(r=2, lora_alpha=4, target_modules=("up_proj",)), adapter)
    save_state(tmp_path / "out/mine/checkpoints", 200, state(), IDENTITY)
    return tmp_path


def test_the_page_shows_every_command() -> None:
    assert [shlex.split(lines)[3] for lines, _ in SHOWN] == ["inspect", "diff", "verify", "convert"]


def test_every_command_prints_what_the_page_says(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for lines, text in SHOWN:
        for line in lines.replace("\\\n", " ").strip().splitlines():
            words = shlex.split(line, comments=True)
            assert words[:3] == ["python", "-m", "areno_fn.ckpt"]
            assert command(words[3:]) == (1 if "diff" in words else 0), line
        if text:
            assert capsys.readouterr().out == text
    merged, base = read_files(place / "out/merged")[0], read_files(place / "BASE")[0]
    changed = [name for name in base if not torch.equal(merged[name], base[name].float())]
    assert changed == [f"{MODULE}.weight"]


def test_the_table_of_fields_is_that_of_the_code() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", PAGE, flags=re.MULTILINE))
    assert rows == dict(ACCEPTABLE)
    assert all(f"`{name}`" in PAGE for name in NEVER)
