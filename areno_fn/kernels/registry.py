"""What kernels there are: found in the folders, so that no list can be wrong."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import attrs

from areno_fn import kernels
from areno_fn.kernels.measured import DEVICE, MEASURED


@attrs.frozen(kw_only=True)
class Kernel:
    """One folder of `areno_fn/kernels`.

    Attributes:
        name: the folder.
        purpose: the first sentence of its docstring.
        backends: `reference` and `triton` where it has them; `torch` where torch's own kernels do the work.
        hot: the sizes and dtypes at which it is tested because training runs there; none where `cases.py` has no `CASES`.
        measured: what `benchmarks/kernels.py` last printed of it on `DEVICE`.
    """

    name: str
    purpose: str
    backends: tuple[str, ...]
    hot: tuple[str, ...]
    measured: tuple[str, ...]


def every_kernel() -> tuple[Kernel, ...]:
    """All of them by name. Their `cases.py` need the package hypothesis."""
    folders = sorted(module.name for module in pkgutil.iter_modules(kernels.__path__) if module.ispkg)
    return tuple(_described(name) for name in folders)


def _described(name: str) -> Kernel:
    package = importlib.import_module(f"areno_fn.kernels.{name}")
    parts = {module.name for module in pkgutil.iter_modules(package.__path__)}
    purpose = (package.__doc__ or "").split("\n\n")[0].strip().rstrip(".")
    module = importlib.import_module(f"areno_fn.kernels.{name}.cases") if "cases" in parts else package
    cases: Any = vars(module).get("CASES")  # a kernel without a derivative has a law of its own
    return Kernel(
        name=name,
        purpose=purpose.partition(": ")[2],
        backends=tuple(part for part in ("reference", "triton") if part in parts) or ("torch",),
        hot=tuple(shown(case) for case in cases.hot) if cases else (),
        measured=tuple(line for label, line in MEASURED if label.split()[0] == name),
    )


def shown(case: Any) -> str:
    """A case in a word or two: `16384x1024 bfloat16`."""
    words = ("x".join(map(str, case.sizes)), str(case.dtype).removeprefix("torch."), case.variant)
    return " ".join(word for word in words if word)


def text(found: tuple[Kernel, ...]) -> str:
    """A paragraph for each kernel."""
    paragraphs = []
    for kernel in found:
        lines = [f"{kernel.name} ({', '.join(kernel.backends)}): {kernel.purpose}"]
        lines += [f"  tested on a GPU at: {case}" for case in kernel.hot]
        lines += [f"  measured: {line}" for line in kernel.measured]
        paragraphs.append("\n".join(lines))
    return "\n\n".join([*paragraphs, f"Measured forward and backward on {DEVICE}."])
