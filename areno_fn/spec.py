"""`python -m areno_fn.spec`: start, check, convert and show run specifications."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from areno_fn.command import MISTAKE, main, note, report
from areno_fn.contracts.errors import ArenoError, SpecError
from areno_fn.contracts.spec import RunSpec
from areno_fn.engine import specfile
from areno_fn.engine.composition import check_composition


def command(arguments: Sequence[str]) -> int:
    """Runs one subcommand and returns its exit code."""
    options, strange = _parser().parse_known_args(list(arguments))
    if strange:  # argparse itself would show how the command above is used
        options.parser.error(f"unrecognized arguments: {' '.join(strange)}")
    code: int | None = options.run(options)
    return code or 0


def new(options: argparse.Namespace) -> None:
    """Writes a commented specification to start from."""
    target = Path(options.file)
    if target.suffix.lower() != ".toml":
        raise SpecError(f"{target}: a new specification is commented TOML, so its name must end in .toml")
    _refuse_overwriting(target, options.force)
    try:
        target.write_text(specfile.commented(specfile.STARTERS[options.kind]()), encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{target}: cannot be written: {(error.strerror or str(error)).lower()}") from None
    print(f"{target}: edit it, then `python -m areno_fn.spec check {target}`")


def pack(options: argparse.Namespace) -> None:
    """Packs a readable specification as MessagePack, every field written out."""
    source = Path(options.file)
    target = Path(options.output) if options.output else source.with_suffix(".msgpack")
    _require_suffix(target, ".msgpack", "what is packed")
    specfile.write(specfile.read(source), target)
    print(target)


def unpack(options: argparse.Namespace) -> None:
    """Writes a packed specification in a readable format."""
    source = Path(options.file)
    _require_suffix(source, ".msgpack", "what is unpacked")
    target = Path(options.output) if options.output else source.with_suffix(".toml")
    _refuse_overwriting(target, options.force)
    specfile.write(specfile.read(source), target)
    print(target)


def upgrade(options: argparse.Namespace) -> None:
    """Writes a specification of an older version in the version of this release, settings alone, without comments."""
    target = Path(options.output)
    _refuse_overwriting(target, options.force)
    specfile.upgrade(Path(options.file), target)
    print(target)


def check(options: argparse.Namespace) -> int:
    """Checks specifications; 2 when one of them is wrong."""
    wrong = 0
    for name in options.files:
        try:
            spec = specfile.read(name, options.set, note)
            check_composition(spec)
            if options.packed:
                _require_packed(Path(name))
            if options.plan:
                _require_plan(spec)
        except ArenoError as error:
            report(error)
            wrong += 1
        else:
            phases = ", ".join(phase.name for phase in spec.phases)
            print(f"OK {name}: {spec.name}, phases {phases}")
    return MISTAKE if wrong else 0


def schema(options: argparse.Namespace) -> None:
    """Prints the JSON schema of specifications."""
    del options
    print(json.dumps(specfile.schema(), indent=2))


def show(options: argparse.Namespace) -> None:
    """Prints a specification with every default written out."""
    sys.stdout.write(specfile.text(specfile.read(options.file, options.set, note)))


def _require_plan(spec: RunSpec) -> None:
    from areno_fn.engine.plan import plan  # with torch and everything else: only for those who ask

    plan(spec)


def _require_packed(source: Path) -> None:
    _require_suffix(source, ".toml", "--packed compares with the .msgpack beside it, so the file")
    packed = source.with_suffix(".msgpack")
    if not packed.exists():
        raise SpecError(f"{packed}: no such file; `python -m areno_fn.spec pack {source}` writes it")
    difference = specfile.first_difference(specfile.read(source), specfile.read(packed))
    if difference is not None:
        raise SpecError(f"{source} and {packed} differ at {difference}; run `python -m areno_fn.spec pack {source}`")


def _require_suffix(path: Path, suffix: str, what: str) -> None:
    if path.suffix.lower() != suffix:
        raise SpecError(f"{path}: {what} must end in {suffix}")


def _refuse_overwriting(target: Path, force: bool) -> None:
    if target.exists() and not force:
        raise SpecError(f"{target}: the file exists; pass --force to replace it, or name another")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m areno_fn.spec", description="Work with run specifications.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    one = _add(commands, "new", new, "write a commented specification to start from")
    one.add_argument("file", metavar="FILE.toml")
    one.add_argument("--kind", choices=list(specfile.STARTERS), default="sft", help="what it is for (default: sft)")
    one.add_argument("--force", action="store_true", help="replace an existing file")

    one = _add(commands, "pack", pack, "write a specification as .msgpack")
    one.add_argument("file", metavar="IN.toml")
    one.add_argument("output", nargs="?", metavar="OUT.msgpack")

    one = _add(commands, "unpack", unpack, "write a .msgpack specification as .toml, .yaml or .json")
    one.add_argument("file", metavar="IN.msgpack")
    one.add_argument("output", nargs="?", metavar="OUT.toml")
    one.add_argument("--force", action="store_true", help="replace an existing file")

    one = _add(
        commands, "upgrade", upgrade, "write a specification of an older version in this one's; comments are lost"
    )
    one.add_argument("file", metavar="OLD")
    one.add_argument("output", metavar="NEW")
    one.add_argument("--force", action="store_true", help="replace an existing file")

    one = _add(commands, "check", check, "say whether specifications are right, and if not, why")
    one.add_argument("files", nargs="+", metavar="FILE")
    one.add_argument("--packed", action="store_true", help="also compare each .toml with the .msgpack beside it")
    one.add_argument(
        "--plan", action="store_true", help="also check model, data and rewards, as a run would before loading"
    )
    _add_set(one)

    _add(commands, "schema", schema, "print the JSON schema")

    one = _add(commands, "show", show, "print a specification as TOML with all defaults")
    one.add_argument("file", metavar="FILE")
    _add_set(one)
    return parser


def _add(commands: argparse._SubParsersAction, name: str, run: object, words: str) -> argparse.ArgumentParser:
    one: argparse.ArgumentParser = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
    one.set_defaults(run=run, parser=one)
    return one


def _add_set(one: argparse.ArgumentParser) -> None:
    words = "change one field, for example phases.sft.steps=100"
    one.add_argument("--set", action="append", default=[], metavar="A.B=V", help=words)


if __name__ == "__main__":
    sys.exit(main(command))
