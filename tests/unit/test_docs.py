"""Nothing in the README and the guides is shown that no test runs: blocks are accounted for, and commands are those that exist."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import areno_fn as af

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_BY: dict[str, dict[str, tuple[int, tuple[str, ...]]]] = {
    "README.md": {"bash": (2, ("e2e/test_readme.py",)), "python": (1, ("e2e/test_readme.py",))},
    "docs/adapters.md": dict.fromkeys(("bash", "python", "toml"), (1, ("e2e/test_lora.py",))),
    "docs/adding/flow_family.md": {"python": (2, ("unit/test_flow_fields.py",))},
    "docs/adding/kernel.md": {
        language: (number, ("unit/test_kernel_law.py",))
        for language, number in (("python", 5), ("bash", 1), ("text", 1))
    },
    "docs/adding/loss.md": {"python": (4, ("e2e/test_readme.py",))},
    "docs/adding/model.md": {"python": (7, ("e2e/test_readme.py",)), "text": (4, ("e2e/test_readme.py",))},
    "docs/adding/reward.md": {"python": (2, ("e2e/test_readme.py",)), "toml": (3, ("e2e/test_readme.py",))},
    "docs/checkpoints.md": dict.fromkeys(("bash", "text"), (4, ("e2e/test_checkpoints_guide.py",))),
    "docs/consistency.md": dict.fromkeys(("python", "toml"), (1, ("unit/test_consistency.py",))),
    "docs/flow.md": {
        "python": (3, ("e2e/test_flow_run.py", "e2e/test_pipeline_run.py", "unit/test_flow_guide.py")),
        "toml": (4, ("unit/test_flow_guide.py", "unit/test_pipeline_plan.py")),
    },
    "docs/laws.md": {"python": (7, ("e2e/test_readme.py",)), "text": (2, ("e2e/test_readme.py",))},
    "docs/roles.md": {"python": (1, ("e2e/test_readme.py",)), "toml": (1, ("e2e/test_readme.py",))},
    "docs/variants.md": {"python": (1, ("e2e/test_variants_run.py",)), "toml": (2, ("e2e/test_variants_run.py",))},
}
"""For every page the number of its blocks in each language, and the tests that take them from it."""

COMMAND = re.compile(r"`?python ((?:-m )?[\w./]+)((?: [^`\n]*)?)")


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands() -> list[tuple[str, str, str]]:
    """Page, program and what follows it, of every command that begins with python."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        found += [(named(page), program, rest) for program, rest in COMMAND.findall(text)]
    return found


def test_where_a_run_goes_on_bit_for_bit_is_said_wherever_that_is_promised() -> None:
    promised = 0
    for page in PAGES:
        for sentence in re.split(r"(?<=[.:;])\s|\n\n", page.read_text(encoding="utf-8")):
            if "bit for bit" in sentence and re.search(r"killed|continue|resume|goes on|stopped", sentence):
                promised += 1
                assert re.search("on the CPU|attention adds up in one order", sentence, re.IGNORECASE), (
                    named(page),
                    sentence,
                )
    assert promised >= 5


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_is_run_by_a_test(page: Path) -> None:
    blocks = re.findall(r"^```(\w*)\n.*?^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    known = RUN_BY.get(named(page), {})
    assert {language: blocks.count(language) for language in set(blocks)} == {name: n for name, (n, _) in known.items()}
    for _, files in known.values():
        for file in files:
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert named(page) in text or f'"{page.relative_to(ROOT / "docs")}"' in text, (
                f"{file} does not read the page"
            )


def test_commands_are_found() -> None:
    programs = {program for _, program, _ in commands()}
    assert {"-m areno_fn.run", "-m areno_fn.ckpt", "-m benchmarks.distillation", "-m benchmarks.rollout"} <= programs


@pytest.mark.parametrize(("page", "program", "rest"), sorted(set(commands())))
def test_every_command_exists_with_its_options(page: str, program: str, rest: str) -> None:
    module = program.removeprefix("-m ").rstrip(".")
    if program.startswith("-m areno_fn"):
        assert find_spec(module) is not None, f"{page}: {program}"
        place = ROOT / module.replace(".", "/")
        files = [place.with_suffix(".py")] if place.with_suffix(".py").exists() else [*place.rglob("*.py")]
    else:
        files = [ROOT / (f"{module.replace('.', '/')}.py" if program.startswith("-m ") else module)]
    assert all(file.exists() for file in files), f"{page}: python {program} is not there"
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    # a sentence may go on behind the command, so only what is written as an option is one
    for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", rest):
        assert f'"{option}"' in text, f"{page}: python {program} has no {option}"


def test_what_is_named_of_the_repository_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"`((?:specs|tests|benchmarks|areno_fn)/[\w/]+\.(?:py|toml))`", text):
            assert (ROOT / path).exists(), f"{named(page)}: {path}"
        for link in re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", text):
            assert (page.parent / link).exists(), f"{named(page)}: {link}"
        assert set(re.findall(r"areno-fn\[(\w+)\]", text)) <= set(extras), named(page)


@pytest.mark.parametrize("name", ["flow", "flow_distill", "flow_dmd2", "flow_tdm", "flow_tdm_r1"])
def test_every_specification_of_pictures_is_planned_and_in_the_guide(name: str) -> None:
    assert f"`specs/{name}.toml`" in (ROOT / "docs/flow.md").read_text(encoding="utf-8")
    made = af.plan(af.read_spec(str(ROOT / f"specs/{name}.toml"), ["device=cpu"]))
    assert made.evaluation is not None and len(made.phases) == 2
    assert [line for phase in made.phases for line in phase.remarks()] == []
