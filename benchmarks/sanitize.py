"""A small call of every kernel, forward and backward, under compute-sanitizer.

    python -m benchmarks.sanitize [--tools memcheck racecheck] [--only rms_norm ...]

memcheck finds accesses outside of an allocation, racecheck those of threads to shared memory in no order. The calls are those
by which `python -m areno_fn.check` tries a device. Exits with 1 where a tool finds something, and says so where there is no tool.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

import torch

from areno_fn.engine.smoke import SMOKE
from benchmarks import needs

PLACES = (os.environ.get("PATH", ""), "/usr/local/cuda/bin")


def main() -> int:
    """Runs the tools one after the other, or the calls where a tool has started this."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tools", nargs="*", default=("memcheck", "racecheck"))
    parser.add_argument("--only", nargs="*", choices=sorted(SMOKE), default=sorted(SMOKE))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return _calls(options.only)
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join(PLACES))
    needs.gpu("a check of kernels by compute-sanitizer")
    if tool is None:
        raise needs.NeedsError("compute-sanitizer is not on this machine; it comes with the CUDA toolkit")
    found = [_under(tool, name, options.only) for name in options.tools]
    return int(any(found))


def _calls(names: list[str]) -> int:
    """Forward and backward of every kernel in bfloat16 and float32."""
    for name in names:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.linspace(-2, 2, 96, device="cuda").reshape(3, 32).to(dtype).requires_grad_()
            y = SMOKE[name](x)
            torch.autograd.grad(y.float().sum(), x)
        torch.cuda.synchronize()
        print(f"called {name}", flush=True)
    return 0


def _under(tool: str, name: str, kernels: list[str]) -> bool:
    """Whether a tool finds something."""
    command = [tool, "--tool", name, "--error-exitcode", "9", "--print-limit", "8"]
    # kernels of torch itself are not watched, which would take minutes
    command += [
        "--kernel-name-exclude",
        "kernel_substring=at::",
        sys.executable,
        "-m",
        "benchmarks.sanitize",
        "--inside",
    ]
    process = subprocess.Popen(
        [*command, "--only", *kernels], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{name}: {line.rstrip()[:200]}", flush=True)
    return process.wait() != 0


if __name__ == "__main__":
    needs.run(main)
