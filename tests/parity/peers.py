"""Every family that transformers has, there and back: saved there, loaded and saved here, loaded there again.

    python tests/parity/peers.py [FAMILY ...]

prints a line for each tiny model: its tensors there, its leaves here, and whether names, dtypes, every bit and every
logit came back. Exit code 1 when something did not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from areno_fn.ckpt import hf
from areno_fn.models.bailing.tiny import DELTA_VARIANTS
from areno_fn.models.layouts import FAMILY_LAYOUTS, TokenLayout, layout_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""Arithmetic that works for sizes as odd as those here."""

SHARD = 4_000
"""Bytes; a tiny model has several files of this size."""


@attrs.frozen(kw_only=True)
class Case:
    """A tiny model and the form in which it is written.

    Attributes:
        family, variant: which configuration.
        config: its contents.
        dtype: of all parameters.
        sharded: in several files.
        alone: saved here without a folder to imitate.
    """

    family: str
    variant: str
    config: dict[str, Any]
    dtype: Literal["float32", "bfloat16"]
    sharded: bool
    alone: bool = False

    def __str__(self) -> str:
        form = "sharded" if self.sharded else "single"
        return f"{self.family}, {self.variant}, {self.dtype}, {form}{', alone' if self.alone else ''}"


@attrs.frozen(kw_only=True)
class Result:
    """What came back.

    Attributes:
        tensors: in the files that transformers wrote.
        leaves: of the tree here.
        files: that transformers wrote.
        problems: in what the two differ, in words.
    """

    tensors: int
    leaves: int
    files: int
    problems: tuple[str, ...]


def peers() -> list[tuple[TokenLayout, str]]:
    """The families and variants that transformers has."""
    return [
        (family, variant)
        for family in FAMILY_LAYOUTS
        for variant, config in family.variants.items()
        if config["model_type"] in CONFIG_MAPPING
        and variant not in family.strangers
        # of bailing transformers has one generation, the one with delta layers
        and (family.name != "bailing" or variant in DELTA_VARIANTS)
    ]


def cases(families: tuple[str, ...] = ()) -> Iterator[Case]:
    """Every combination, of the named families or all."""
    for (family, variant), dtype, sharded in itertools.product(peers(), DTYPES, (False, True)):
        if not families or family.name in families:
            config = family.variants[variant]
            yield Case(family=family.name, variant=variant, config=config, dtype=dtype, sharded=sharded)
            if not sharded and "vision_config" not in config:  # a whole model needs what the layout leaves out
                yield Case(family=family.name, variant=variant, config=config, dtype=dtype, sharded=False, alone=True)


def built(case: Case) -> Any:
    """The model in transformers, with random numbers in every parameter and every stored buffer."""
    config = AutoConfig.for_model(**json.loads(json.dumps(case.config)))
    kind = AutoModelForImageTextToText if "vision_config" in case.config else AutoModelForCausalLM
    model = kind.from_config(config, **PLAIN).eval()
    generator = torch.Generator().manual_seed(7)
    stored = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name in sorted(stored):
            if stored[name].is_floating_point():
                stored[name].normal_(0, 0.3, generator=generator).add_(1.0 if "norm" in name else 0.0)
    return model.to(DTYPES[case.dtype])


def again(model: Any, folder: Path) -> Any:
    """The model of a folder, in which nothing is missing and nothing left over."""
    loaded, info = type(model).from_pretrained(folder, dtype="auto", output_loading_info=True, **PLAIN)
    left = {key: value for key, value in info.items() if value}
    assert not left, f"transformers did not find everything in {folder}: {left}"
    return loaded.eval()


def through(source: Path, out: Path, *, sharded: bool, alone: bool) -> int:
    """Loads a folder through its layout and saves it again; returns how many leaves there were."""
    folder = hf.open_folder(source)
    family = layout_of(folder.config)
    config = family.config_from_hf(folder.config)
    left_out = family.left_out(config)
    layout = family.layout(config, family.kept(config, folder.specs))
    leaves = hf.load(folder, layout, left_out=left_out)
    if alone:
        hf.save(out, leaves, layout, folder.config)
    else:
        hf.save(
            out,
            leaves,
            layout,
            folder.config,
            source=folder,
            left_out=left_out,
            shard_bytes=SHARD if sharded else 10**9,
        )
    return len(leaves)


def check(case: Case, scratch: Path) -> Result:
    """One model there and back; `scratch` is an empty folder."""
    first, there, here = (scratch / name for name in ("first", "there", "here"))
    made = built(case)
    made.save_pretrained(first)
    model = again(made, first)  # in the dtypes that transformers keeps: some stay wider than the rest
    model.save_pretrained(there, max_shard_size=SHARD if case.sharded else "1GB")
    leaves = through(there, here, sharded=case.sharded, alone=case.alone)
    theirs, ours = written(there), written(here)
    problems = _different("a file", theirs, ours)
    back = again(model, here)
    problems += _different("the state in transformers", model.state_dict(), back.state_dict())
    with torch.no_grad():
        tokens = (torch.arange(12).reshape(2, 6) * 3) % 8 + 2  # in every vocabulary, that of gemma4's layers too
        wanted, found = (m(input_ids=tokens, use_cache=False).logits for m in (model, back))
    if not torch.equal(wanted, found):
        problems.append(f"logits are off by {float((wanted - found).abs().max()):.3g}")
    if not bool(wanted.isfinite().all()) or float(wanted.abs().max()) < 1e-3:
        problems.append("logits say nothing")
    files = len(list(there.glob("*.safetensors")))
    if (files > 1) != case.sharded or (len(list(here.glob("*.safetensors"))) > 1) != case.sharded:
        problems.append("the number of files is not the one asked for")
    return Result(tensors=len(theirs), leaves=leaves, files=files, problems=tuple(problems))


def written(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, read by the safetensors library."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def _different(where: str, wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    problems = [f"{where} lacks {name}" for name in wanted if name not in found]
    problems += [f"{where} has {name} besides" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        a, b = wanted[name], found[name]
        if a.dtype != b.dtype or not torch.equal(a, b):
            problems.append(f"{where} has another {name}")
    return problems


def main(families: list[str]) -> int:
    """Runs every case and prints a line for each."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    wrong = count = 0
    for case in cases(tuple(families)):
        with tempfile.TemporaryDirectory() as scratch:
            result = check(case, Path(scratch))
        count += 1
        wrong += bool(result.problems)
        outcome = "; ".join(result.problems) or "same"
        print(f"{case!s:62} {result.tensors:4} tensors in {result.files:2} files, {result.leaves:3} leaves: {outcome}")
    print(f"{count} models, {count - wrong} came back bit for bit")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    families = [family.name for family in FAMILY_LAYOUTS]
    parser.add_argument("family", nargs="*", help=f"of {', '.join(families)}; all when none is named")
    named = parser.parse_args().family
    if strangers := sorted(set(named) - set(families)):
        parser.error(f"there is no family {', '.join(strangers)}; the families are {', '.join(families)}")
    sys.exit(main(named))
