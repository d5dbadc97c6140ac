"""A real model as the judge: SmolLM2-135M-Instruct through everything that a run does, with figures.

    python tests/smollm2.py FOLDER                  makes the folder, once
    python tests/parity/smollm2.py FOLDER [OUT]     prints a line per finding; exits with 1 when a bound is broken

OUT receives the runs and folders that are written; a temporary folder is used, and removed, without one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from areno_fn import Key, Prompts, Rollout, Sampling, experience, load_hf, sampler, save_hf
from areno_fn.ckpt import hf
from areno_fn.engine.model import ModelPlan
from areno_fn.models.decoder_forward import forward
from areno_fn.steps.token.score import reference_logp
from areno_fn.world import tokenizer_hf

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = (
    "What is the capital of France?",
    "Write two lines about the sea.",
    "Explain in one sentence why the sky is blue.",
    "Name three prime numbers.",
    "How do I sort a list in Python?",
)
TEXTS = ("Once upon a time", "def add(a, b):\n    return a + b\n", "Grüße, 世界! 🙂 ½", "1")
SAMPLINGS = (Sampling(max_tokens=24), Sampling(max_tokens=24, temperature=0.7, top_p=0.9))
CPU = torch.device("cpu")


@attrs.frozen
class Finding:
    """Something measured: what it is, the figure, and whether it is within its bound."""

    what: str
    figure: str
    holds: bool = True

    def __str__(self) -> str:
        return f"{'ok  ' if self.holds else 'FAIL'} {self.what}: {self.figure}"


@attrs.frozen
class Subject:
    """The folder, and the model, parameters and tokenizer that were read from it."""

    folder: Path
    model: ModelPlan
    params: Any
    tokenizer: tokenizer_hf.HFTokenizer

    def asked(self, question: str) -> list[int]:
        """A question as the chat template opens it."""
        return self.tokenizer.encode(self.tokenizer.render([{"role": "user", "content": question}], True))


def subject(folder: Path) -> Subject:
    model, params = load_hf(folder)
    return Subject(folder, model, params, tokenizer_hf.load_hf(str(folder), model.declared_eos))


def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True).eval()


# ---------------------------------------------------------------------------------------- the model


def logits(one: Subject, theirs: Any) -> Iterator[Finding]:
    """Packed together here, and each document alone in transformers."""
    asked = [one.asked(question) for question in QUESTIONS]
    documents = [torch.tensor(ids) for ids in (*asked, *map(one.tokenizer.encode, TEXTS))]
    lengths = torch.tensor([len(document) for document in documents])
    positions = torch.cat([torch.arange(int(n)) for n in lengths])
    segments = torch.repeat_interleave(torch.arange(len(documents)), lengths)
    with torch.no_grad():
        ours = forward(one.params, one.model.config, torch.cat(documents), positions, segments)
        wanted = torch.cat([theirs(document[None]).logits[0] for document in documents])
    worst = float((ours - wanted).abs().max())
    shown = f"{worst:.1e} at most, on {len(documents)} packed documents of {len(positions)} tokens"
    yield Finding(
        "logits against transformers", f"{shown}, logits up to {float(wanted.abs().max()):.0f}", worst <= 1e-4
    )


def greedy(one: Subject, theirs: Any, tokens: int = 40) -> Iterator[Finding]:
    """Answers of the rollout at temperature 0, and of transformers' `generate`."""
    asked = [one.asked(question) for question in QUESTIONS]
    rollout = sampler(one.model.policy, one.tokenizer.eos_ids)
    drawn = rollout(one.params, padded(asked), Key.of(0), Sampling(max_tokens=tokens, temperature=0.0))
    for question, ids, ours in zip(QUESTIONS, asked, completions(drawn), strict=True):
        wanted = generate(theirs, ids, tokens, one.tokenizer.eos_ids)
        same = "the same tokens" if ours == wanted else f"transformers says {one.tokenizer.decode(wanted)!r}"
        text = one.tokenizer.decode(ours)
        yield Finding(f"greedy, {question!r}", f"{len(ours)} tokens, {same}: {text!r}", ours == wanted)


def recorded(one: Subject, sampling: Sampling, samples: int = 4) -> Iterator[Finding]:
    """Log-probabilities that rollouts in different batches record, and those of training forwards on the same tokens."""
    asked = [one.asked(question) for question in QUESTIONS[:4]]
    rollout, score = sampler(one.model.policy, one.tokenizer.eos_ids), reference_logp(one.model.policy, sampling)
    name = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"
    drawn = rollout(one.params, padded(asked), Key.of(3), sampling, samples=samples)
    for micro_tokens in (4096, 150):
        batches = experience(drawn, torch.zeros(len(drawn.lengths)), micro_tokens=micro_tokens)
        gaps = torch.cat([(score(one.params, batch.packed) - batch.old).abs() for batch in batches])
        yield _gap(f"training in micro-batches of {micro_tokens}, {name}", gaps)
    rows = {ids: row for row, ids in enumerate(drawn.ids.tolist())}
    for what, order, most in (("reversed, 3 rows at once", [3, 2, 1, 0], 3), ("a prompt alone, row by row", [2], 1)):
        prompts = padded([asked[i] for i in order], order)
        again = rollout(one.params, prompts, Key.of(3), sampling, samples=samples, max_rows=most)
        place = torch.tensor([rows[ids] for ids in again.ids.tolist()])
        if not torch.equal(again.tokens, drawn.tokens[place]):
            yield Finding(f"a rollout {what}, {name}", "other tokens", False)
            continue
        drew = torch.arange(sampling.max_tokens) < again.lengths[:, None]
        yield _gap(f"a rollout {what}, {name}", (again.logp - drawn.logp[place]).abs()[drew])


def _gap(what: str, gaps: torch.Tensor) -> Finding:
    equal = f"{int((gaps == 0).sum())} of {gaps.numel()} equal to the bit"
    return Finding(what, f"{float(gaps.max()):.1e} at most, {equal}", float(gaps.max()) <= 1e-5)


# ---------------------------------------------------------------------------------------- checkpoints


def round_trips(one: Subject, scratch: Path) -> Iterator[Finding]:
    """Loaded and saved: whole, in shards, and in bfloat16, as it is and by way of float32."""
    yield _unchanged("saved again", one.folder, save_hf(scratch / "again", one.params, one.model))
    model = one.model
    sharded = hf.save(
        scratch / "sharded", one.params, model.layout, model.hf_config, source=model.folder, shard_bytes=60_000_000
    )
    files = len(list(sharded.glob("*.safetensors")))
    yield _unchanged(f"saved in {files} shards", one.folder, sharded)
    yield _unchanged("the shards saved as one", one.folder, save_hf(scratch / "joined", load_hf(sharded)[1], model))
    halved = _in_bfloat16(one.folder, scratch / "bfloat16")
    for dtype in ("source", "float32"):
        again, params = load_hf(halved, dtype=dtype)
        out = save_hf(scratch / f"bfloat16-{dtype}", params, again)
        yield _unchanged(f"bfloat16 in the file, {dtype} in memory", halved, out)


def _unchanged(what: str, source: Path, out: Path) -> Finding:
    before, after = tensors(source), tensors(out)
    alike = [name for name in before if name in after and before[name].dtype == after[name].dtype]
    bits = sum(_differing_bits(before[name], after[name]) for name in alike)
    others = [p.name for p in source.iterdir() if "safetensors" not in p.name]
    lost = [name for name in others if not (out / name).is_file() or not _same_file(source / name, out / name)]
    holds = before.keys() == after.keys() and len(alike) == len(before) and not bits and not lost
    figure = f"{bits} bits differ in {len(alike)} tensors of equal name and dtype, of {len(before)} and {len(after)}"
    return Finding(what, f"{figure}; {len(others) - len(lost)} of {len(others)} other files carried over", holds)


def _differing_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    a, b = (x.contiguous().view(torch.uint8) for x in (a, b))
    if a.shape != b.shape:
        return 8 * max(a.numel(), b.numel())
    different = (a ^ b).flatten()
    return sum(int(((different >> bit) & 1).sum()) for bit in range(8)) if bool(different.any()) else 0


def _same_file(a: Path, b: Path) -> bool:
    if a.suffix == ".json":
        return bool(json.loads(a.read_bytes()) == json.loads(b.read_bytes()))
    return a.read_bytes() == b.read_bytes()


def _in_bfloat16(source: Path, out: Path) -> Path:
    out.mkdir()
    for path in source.iterdir():
        if "safetensors" not in path.name:
            shutil.copy(path, out)
    config = json.loads((source / "config.json").read_bytes())
    (out / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    halved = {name: tensor.bfloat16() for name, tensor in tensors(source).items()}
    save_file(halved, str(out / "model.safetensors"), metadata={"format": "pt"})
    return out


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in a folder's safetensors files, read by the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


# ---------------------------------------------------------------------------------------- training


def sft(folder: Path, out: Path) -> Iterator[Finding]:
    """Two steps of specs/sft.toml."""
    lines = yield from trained("sft", folder, out, [f"model.path={folder}"])
    losses = [line["train/loss"] for line in lines]
    yield Finding("SFT losses", ", ".join(f"{loss:.4f}" for loss in losses), len(losses) == 2)


def grpo(folder: Path, out: Path) -> Iterator[Finding]:
    """Two steps of specs/grpo.toml, 8 samples of 2 prompts, with a reward of our own."""
    changes = ["steps=2", "batch.rows=2", "algorithm.sampling.max_tokens=40"]
    changes.append("rewards.0.function=tests.parity.rewards_example:right_and_short")
    changes = [f"model.path={folder}", *(f"phases.grpo.{change}" for change in changes)]
    lines = yield from trained("grpo", folder, out, changes)
    yield Finding("GRPO rewards", ", ".join(f"{line['reward/right_and_short']:.3f}" for line in lines), len(lines) == 2)
    for line in lines:
        peak, gap = line["train/ratio_max"], line["train/logp_diff_max"]
        yield Finding(f"GRPO step {line['step']}", f"ratio_max {peak:.8f}, logp_diff_max {gap:.1e}", gap <= 1e-5)
    kl = [line["train/kl"] for line in lines]
    yield Finding("KL to the reference", ", ".join(f"{x:.1e}" for x in kl), abs(kl[0]) <= 1e-9 < kl[-1])


def trained(
    name: str, folder: Path, out: Path, changes: Sequence[str], *, whole: bool = True
) -> Generator[Finding, None, list[dict[str, Any]]]:
    """Runs a specification and judges its export; returns the lines of metrics.jsonl.

    Args:
        whole: every tensor is trained; otherwise some are.
    """
    command = [sys.executable, "-m", "areno_fn.run", f"specs/{name}.toml", "--out", str(out), "--overwrite"]
    for change in changes:
        command += ["--set", change]
    process = subprocess.Popen(command, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"FAIL specs/{name}.toml: the run ended with {process.returncode}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]
    seconds = ", ".join(f"{line['time/step']:.1f}" for line in lines)
    yield Finding(f"specs/{name}.toml", f"peak memory {usage.ru_maxrss / 2**20:.2f} GiB, steps of {seconds} s")
    yield from _exported(name, folder, out / "export", whole)
    return lines


def _exported(name: str, folder: Path, export: Path, whole: bool) -> Iterator[Finding]:
    before, after = tensors(folder), tensors(export)
    kinds = [{key: (x.dtype, x.shape) for key, x in group.items()} for group in (before, after)]
    moved = sum(not torch.equal(before[key], after[key]) for key in before if key in after)
    figure = (
        f"{len(after)} tensors, {moved} of them trained, {'the' if kinds[0] == kinds[1] else 'not the'} keys and dtypes"
    )
    yield Finding(
        f"{name} export",
        f"{figure} of the source",
        kinds[0] == kinds[1] and moved == len(before) if whole else moved > 0,
    )
    text = answer(export, QUESTIONS[0])
    yield Finding(f"{name} export in transformers, {QUESTIONS[0]!r}", repr(text), "Paris" in text)


def answer(folder: Path, question: str) -> str:
    """What transformers, which knows nothing of this library, makes of a folder."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    turns = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    text = tokenizer.decode(generate(reference(folder), ids, 40, [tokenizer.eos_token_id]), skip_special_tokens=True)
    return str(text)


# ---------------------------------------------------------------------------------------- shared


def padded(prompts: Sequence[Sequence[int]], ids: Sequence[int] | None = None) -> Prompts:
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    return Prompts(tokens=tokens, lengths=lengths, ids=torch.tensor(list(ids or range(len(prompts)))))


def completions(drawn: Rollout) -> list[list[int]]:
    return [row[:n] for row, n in zip(drawn.tokens.tolist(), drawn.lengths.tolist(), strict=True)]


def generate(model: Any, ids: Sequence[int], tokens: int, eos: Sequence[int]) -> list[int]:
    prompt = torch.tensor([list(ids)])
    with torch.no_grad():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens,
            eos_token_id=list(eos), pad_token_id=eos[0],
        )  # fmt: skip
    return [int(token) for token in out[0, len(ids) :]]


def findings(folder: Path, out: Path) -> Iterator[Finding]:
    one, theirs = subject(folder), reference(folder)
    yield from logits(one, theirs)
    yield from greedy(one, theirs)
    del theirs
    for sampling in SAMPLINGS:
        yield from recorded(one, sampling)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        yield from round_trips(one, Path(scratch))
    del one
    yield from sft(folder, out / "sft")
    yield from grpo(folder, out / "grpo")


def main(folder: Path, out: Path) -> int:
    broken = 0
    for finding in findings(folder.resolve(), out):
        print(finding, flush=True)
        broken += not finding.holds
    print(f"{broken} bounds broken" if broken else "every bound holds")
    return 1 if broken else 0


if __name__ == "__main__":
    if len(sys.argv) > 2:
        Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
        sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(Path(sys.argv[1]), Path(temporary)))
