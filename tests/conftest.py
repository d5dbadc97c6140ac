"""Settings shared by all tests: repeatable examples, one thread, kernels in the interpreter where there is no GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background jobs are started deaf to Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "default", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options: a real model to test on, and how many examples the properties of layouts are given.

    `--smollm2 FOLDER`: tests of a real model run on what `python tests/smollm2.py FOLDER` makes.
    `--layout-examples N`: examples of a test that is decorated with `settings.get_profile("layouts")`.
    """
    parser.addoption("--smollm2", metavar="FOLDER", help="a folder made by `python tests/smollm2.py FOLDER`")
    parser.addoption(
        "--layout-examples", metavar="N", type=int, default=15, help="examples of a property of layouts (15)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Makes the profile "layouts" before any test module is imported."""
    settings.register_profile(
        "layouts", parent=settings.get_profile("default"), max_examples=config.getoption("--layout-examples")
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need a CUDA device, and those marked `interpreted` Triton's interpreter."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("interpreted") and os.environ.get("TRITON_INTERPRET") != "1":
            item.add_marker(
                pytest.mark.skip(reason="Triton's interpreter is off: tests/gpu holds the same laws on a GPU")
            )


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test marked `traced` runs in an interpreter of its own when typeguard has rewritten the library here."""
    if not pyfuncitem.get_closest_marker("traced") or not pyfuncitem.config.getoption("typeguard_packages"):
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=pyfuncitem.config.rootpath)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return True
