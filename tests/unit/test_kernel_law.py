"""`laws.kernel_agrees` passes on a kernel of the library and names what is wrong with one that has a planted fault."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import areno_fn
from areno_fn import custom_vjp
from areno_fn.contracts.errors import KernelError
from areno_fn.kernels.backend import BACKENDS, interpreted
from areno_fn.kernels.gated_silu import reference
from areno_fn.kernels.gated_silu.cases import CASES
from areno_fn.kernels.law import Case
from areno_fn.testing import laws

ROOT = Path(__file__).parents[2]
CASE = Case(sizes=(2, 3, 8), dtype=torch.float32, strided=True)
INTERPRETED = [pytest.mark.interpreted]


@pytest.mark.parametrize("by", ["device", pytest.param("triton", marks=INTERPRETED)])
def test_a_kernel_that_is_right(by: Any) -> None:
    laws.kernel_agrees(CASES, CASE, by=by)
    assert BACKENDS == {"cpu": "reference", "cuda": "triton"}


def changed(forward: Callable[..., Any] = reference.forward, backward: Callable[..., Any] = reference.backward) -> Any:
    """The kernel with another part."""
    function = custom_vjp(forward, lambda dys, inputs, _: (backward(dys[0], inputs[0]),), keep_outputs=False)
    return attrs.evolve(CASES, function=function)


def halved(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return reference.backward(dy, gate_up) / 2


def written(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    result = reference.backward(dy, gate_up)
    gate_up.zero_()
    return result


def blind_to_strides(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return reference.backward(dy if 0 not in dy.stride() else torch.zeros_like(dy), gate_up)


def forgetful(gate_up: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(reference.forward(gate_up))
    result[..., 1:] = reference.forward(gate_up)[..., 1:]
    return result


def turned(gate_up: torch.Tensor) -> torch.Tensor:
    return reference.forward(gate_up).transpose(0, 1).contiguous().transpose(0, 1)


def widened(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return reference.backward(dy, gate_up)[..., :1].expand(gate_up.shape)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (changed(backward=halved), r"gradient of argument 0 is .* off its formula in float64, and rounding explains"),
        (changed(forward=lambda x: reference.forward(x) + 1e-4), r"output 0 is 0.0001 off its formula"),
        (changed(forward=forgetful), "output 0 is of another shape, infinite or NaN where its formula is not"),
        (changed(backward=written), "an argument was written to"),
        (changed(backward=blind_to_strides), "a cotangent of stride 0, that of a sum, is read as another"),
        (changed(forward=turned), r"output 0 has strides \(8, 16, 1\); return a contiguous one"),
        (changed(backward=widened), "gradient of argument 0 is .* off its formula"),
    ],
)
def test_a_kernel_that_is_wrong(kernel: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=f"gated_silu, Case.*({words})"):
        laws.kernel_agrees(kernel, CASE)
        laws.kernel_agrees(kernel, attrs.evolve(CASE, strided=False))


def test_an_output_that_is_its_argument() -> None:
    same = custom_vjp(lambda x: x.view_as(x), lambda dys, inputs, _: (dys[0],), keep_outputs=False)
    kernel = attrs.evolve(CASES, function=same, oracle=lambda x: x.clone(), noise=lambda a, c: (0.0, 0.0))
    with pytest.raises(AssertionError, match="output 0 shares memory with an argument; return new memory"):
        laws.kernel_agrees(kernel, attrs.evolve(CASE, strided=False))


def test_the_interpreter_must_be_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelError, match="set TRITON_INTERPRET=1 in the environment before Python starts"):
        laws.kernel_agrees(CASES, CASE, by="triton")
    with pytest.raises(KernelError), interpreted():
        pass
    assert BACKENDS["cpu"] == "reference"


# ------------------------------------------------------------------------------------------------ the guide


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs/adding/kernel.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def lay(folder: Path) -> None:
    """Every block is the file that its first line names."""
    for block in blocks("python"):
        file = folder / block.splitlines()[0].removeprefix("# ")
        file.parent.mkdir(exist_ok=True)
        file.write_text(block, encoding="utf-8")


def test_the_guide_makes_a_kernel_that_keeps_the_law_and_is_told_when_not(tmp_path: Path) -> None:
    lay(tmp_path)
    assert blocks("bash") == ["TRITON_INTERPRET=1 pytest -q test_soft_cap.py\n"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(areno_fn.__file__).parents[1])}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "test_soft_cap.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr

    right = (tmp_path / "soft_cap/reference.py").read_text(encoding="utf-8")
    wrong = right.replace("dy * (1 - (y / cap) ** 2)", "dy * -((y / cap) ** 2)")
    assert wrong != right
    (tmp_path / "soft_cap/reference.py").write_text(wrong, encoding="utf-8")
    done = subprocess.run(
        [*command, "-k", "tile and device"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    (said,) = blocks("text")
    assert done.returncode == 1 and f"AssertionError: {said.strip()}" in done.stdout, done.stdout
