"""The rules of the house that no linter knows: who may use what, sizes, docstrings, and what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "areno_fn"
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 500

OUTER = {"ckpt", "world", "engine", "testing", "run", "spec", "check"}
DRAWS = (
    "manual_seed seed rand rand_like randn randn_like randint randint_like randperm normal bernoulli multinomial "
    "nn.init nn.functional.dropout"
).split()
ALLOWED: dict[str, set[str]] = {
    "triton": {"kernels"},
    "torch.distributed": {"dist"},
    "torch.distributed.checkpoint": {"dist", "ckpt"},
    "safetensors": {"ckpt"},
    "safetensors.SafetensorError": {"ckpt", "world"},
    "transformers": {"world"},
    "tokenizers": {"world"},
    "diffusers": {"models", "world"},
    "hypothesis": {"testing", "kernels"},
    "matplotlib": {"world"},
    "rich": {"world", "check"},
    "pickle": set(),
    "torch.save": set(),
    "torch.load": set(),
    "random": {"testing"},
    "numpy.random": {"testing"},
    **{f"torch.{name}": set() for name in DRAWS},
    "time": {"world"},
    "datetime": {"world"},
    "os.environ": {"kernels", "run", "check", "engine", "world"},
    "os.getenv": {"kernels", "run", "check", "engine", "world"},
    "pathlib": OUTER,
    "shutil": OUTER,
    "tempfile": OUTER,
    "open": OUTER,
}
"""Which part of the package may use a name; the longest prefix decides."""


def area(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that is imported, or reached through an import, and of `open`."""
    names = {"open": "open"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
            root, *rest = chain(node)
            if root in names:
                yield node.lineno, ".".join([names[root], *rest])


def chain(node: ast.expr) -> list[str]:
    """The parts of a dotted expression, the root first; the root is empty when it is not a plain name."""
    if isinstance(node, ast.Attribute):
        return [*chain(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def banned(source: str, where: str) -> list[str]:
    """The uses in a module of area `where` that the table does not allow."""
    found = []
    for line, name in uses(ast.parse(source)):
        prefixes = [ban for ban in ALLOWED if name == ban or name.startswith(ban + ".")]
        if prefixes and where not in ALLOWED[max(prefixes, key=len)]:
            found.append(f"{line}: {name}")
    return sorted(set(found))


def undocumented(source: str) -> list[str]:
    """Public functions, classes and methods without a docstring."""
    found = []

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if ast.get_docstring(node) is None:
                found.append(f"{node.lineno}: {prefix}{node.name}")
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{prefix}{node.name}.")

    look(ast.parse(source).body, "")
    return found


def swallowed(source: str) -> list[int]:
    """Lines that catch everything."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"Exception"}
            if caught & {"Exception", "BaseException"}:
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_a_module_keeps_to_the_rules(module: Path) -> None:
    source = module.read_text()
    assert banned(source, area(module)) == []
    assert undocumented(source) == []
    assert area(module) == "kernels" or len(source.splitlines()) <= LONGEST
    assert not [word for word in ("TODO", "FIXME", "XXX") if word in source]
    assert not source.strip() or ast.get_docstring(ast.parse(source)), "a module starts with a docstring"


USER_CODE = {"world/rewards.py", "world/rewards_call.py", "world/rewards_module.py"}
"""Where a function that the user wrote is called, and whatever it raises is reported by row."""

FOREIGN = {"world/tokenizer_backend.py"}
"""Where a library reads a user's files that raises plain `Exception` for what is wrong with them."""


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_a_module_catches_only_what_it_names(module: Path) -> None:
    if str(module.relative_to(PACKAGE)) not in USER_CODE | FOREIGN:
        assert swallowed(module.read_text()) == []


@pytest.mark.parametrize(
    ("source", "where", "name"),
    [
        ("import triton.language as tl", "models", "triton.language"),
        ("from triton import language", "steps", "triton.language"),
        ("import torch\ntorch.distributed.barrier()", "engine", "torch.distributed.barrier"),
        ("from torch import distributed as d\nd.barrier()", "steps", "torch.distributed.barrier"),
        ("import torch.distributed", "ckpt", "torch.distributed"),
        ("from safetensors.torch import save_file", "world", "safetensors.torch.save_file"),
        ("import transformers", "engine", "transformers"),
        ("import torch as t\nx = t.rand(3)", "engine", "torch.rand"),
        ("import torch\ntorch.manual_seed(0)", "run", "torch.manual_seed"),
        ("import torch.nn.functional as F\nF.dropout(x)", "models", "torch.nn.functional.dropout"),
        ("import numpy as np\nnp.random.rand()", "world", "numpy.random.rand"),
        ("import random", "world", "random"),
        ("from time import time", "steps", "time.time"),
        ("import os\nos.environ['A']", "contracts", "os.environ"),
        ("open('a')", "contracts", "open"),
        ("from pathlib import Path", "models", "pathlib.Path"),
        ("import pickle", "ckpt", "pickle"),
        ("import torch\ntorch.load('a')", "ckpt", "torch.load"),
    ],
)
def test_a_planted_use_is_found(source: str, where: str, name: str) -> None:
    assert any(found.endswith(f": {name}") for found in banned(source, where)), banned(source, where)


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("import triton", "kernels"),
        ("import torch\ntorch.distributed.checkpoint.save(x)", "ckpt"),
        ("from areno_fn import random\nrandom.uniform(key)", "steps"),
        ("import torch\ntorch.zeros(3).open()", "steps"),
        ("from pathlib import Path", "engine"),
    ],
)
def test_an_allowed_use_is_not(source: str, where: str) -> None:
    assert banned(source, where) == []


def test_planted_gaps_are_found() -> None:
    assert undocumented("def f(): pass\nclass A:\n    '''A.'''\n    def g(self): pass\n    def _h(self): pass") == [
        "1: f",
        "4: A.g",
    ]
    assert swallowed("try: pass\nexcept: pass") == [2]
    assert swallowed("try: pass\nexcept (ValueError, Exception): pass") == [2]
    assert swallowed("try: pass\nexcept ValueError: pass") == []


def imported_by(statement: str, *names: str) -> list[str]:
    """Which of the named packages a fresh interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nprint(*[n for n in {names!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.split()


HEAVY = ("torch", "triton", "transformers", "matplotlib", "tensorboard", "rich", "hypothesis")


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert imported_by("import areno_fn", *HEAVY) == []


@pytest.mark.parametrize("module", ["contracts.spec", "contracts.execution", "contracts.errors", "spec"])
def test_a_specification_is_read_without_torch(module: str) -> None:
    assert imported_by(f"import areno_fn.{module}", *HEAVY) == []


def test_no_public_name_loads_transformers_or_plots() -> None:
    heavy = ("transformers", "tensorboard", "hypothesis", "matplotlib")
    assert imported_by("from areno_fn import *", *heavy) == []
    others = "import areno_fn\nfor name in areno_fn.__all__: name == 'train' or getattr(areno_fn, name)"
    assert imported_by(others, *heavy, "rich", "tokenizers") == []


def test_the_package_works_without_triton() -> None:
    """Where triton cannot be installed, the CPU still trains."""
    assert imported_by("import sys\nsys.modules['triton'] = None\nfrom areno_fn import *", "torch") == ["torch"]
