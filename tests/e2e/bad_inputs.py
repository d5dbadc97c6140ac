"""Bad inputs and what is said of them.

    python tests/e2e/bad_inputs.py [--all]

prints a sentence for each mistake, as the command line does. Every one is found before a weight is read. Those over roles,
optimizers, rewards and data are in bad_roles.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from e2e import tiny

import areno_fn as af
from areno_fn.ckpt import hf
from areno_fn.command import main
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import ScratchModel
from areno_fn.engine.model import from_scratch
from areno_fn.engine.specfile import read
from areno_fn.run import command
from areno_fn.world import tokenizer_export

SFT_DATA = '{ kind = "arithmetic", digits = 1, count = 40 }'
GRPO_DATA = '{ kind = "arithmetic", digits = 1, count = 20 }'
SCRATCH = tiny.SPEC[tiny.SPEC.index("[model]") : tiny.SPEC.index("[[phases]]")]
LLAMA = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


@attrs.frozen
class Case:
    """A mistake.

    Attributes:
        name: what it is.
        prepare: writes into an empty folder what the mistake needs; returns the arguments of the command.
        sentence: a regular expression for the whole sentence; `{at}` is the folder.
        command: what is run.
    """

    name: str
    prepare: Callable[[Path], list[str]]
    sentence: str
    command: Callable[[Sequence[str]], int | None] = command


def spec(*replacements: tuple[str, str], file: str = "tiny.toml", **values: object) -> Callable[[Path], list[str]]:
    """The tiny specification with pieces of its text replaced, and with fields set."""

    def prepare(folder: Path) -> list[str]:
        text = tiny.SPEC
        for old, new in replacements:
            assert old in text, f"the specification has no {old!r}"
            text = text.replace(old, new.replace("{at}", str(folder)), 1)
        path = tiny.write_spec(folder, text, file)
        named = {name.replace("__", "."): value for name, value in values.items()}
        return [str(path), "--out", str(folder / "out"), *tiny.changes(named)]

    return prepare


def rows(text: str | bytes, place: str = SFT_DATA, **values: object) -> Callable[[Path], list[str]]:
    """The tiny specification with a file of its own rows in place of one of its data sets."""
    prepare = spec((place, '{ kind = "jsonl", path = "{at}/rows.jsonl" }'), **values)

    def write(folder: Path) -> list[str]:
        (folder / "rows.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
        return prepare(folder)

    return write


def folder(change: Callable[[Path], object], **values: object) -> Callable[[Path], list[str]]:
    """The tiny specification with a Hugging Face folder as its model, to which something has happened."""
    prepare = spec((SCRATCH, '[model]\nkind = "hf"\npath = "{at}/model"\n\n'), **values)

    def write(home: Path) -> list[str]:
        write_model(home / "model")
        change(home / "model")
        return prepare(home)

    return write


def write_model(path: Path) -> None:
    """A small llama in several files, with the byte tokenizer."""
    model = from_scratch(ScratchModel(family="llama", config=LLAMA))
    params = model.load(Key.of(0), torch.device("cpu"))
    hf.save(path, params, model.layout, model.hf_config, shard_bytes=8_000)
    tokenizer_export.export(path)


def shard(path: Path, number: int) -> Path:
    return sorted(path.glob("model-*.safetensors"))[number]


def configured(**fields: object) -> Callable[[Path], object]:
    """Changes fields of config.json."""

    def change(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def cut(path: Path) -> None:
    file = shard(path, 1)
    file.write_bytes(file.read_bytes()[:-100])


def yaml_lr(home: Path) -> list[str]:
    lines = [
        "model: {kind: scratch, family: qwen3, config: {}}",
        "phases:",
        "  - name: sft",
        "    steps: 10",
        "    algorithm: {kind: sft}",
        "    data: [{kind: arithmetic}]",
        '    optimizers: [{kind: adamw, lr: "1e-6"}]',
    ]
    return [str(tiny.write_spec(home, "\n".join(lines), "lr.yaml")), "--out", str(home / "out")]


def with_wrong_loss(words: Sequence[str]) -> int:
    """A program of one's own that puts the loss of one algorithm into the other."""
    return af.train(read(words[0], [f"out={words[2]}"]), losses={"sft": af.clipped()})


def module(text: str, name: str) -> Callable[[Path], list[str]]:
    """The tiny specification with a reward of one's own, in a module beside it."""
    prepare = spec(phases__grpo__rewards__0__function=f"{name}:judge")

    def write(home: Path) -> list[str]:
        (home / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)  # that of another folder
        return prepare(home)

    return write


def unwritable(home: Path) -> list[str]:
    (home / "file").write_text("not a folder")
    words = spec()(home)
    return [*words[:2], str(home / "file" / "out"), *words[3:]]


def occupied(*flags: str, **values: object) -> Callable[[Path], list[str]]:
    """A complete run of one step a phase is in the output folder."""
    short = {"phases__sft__steps": 1, "phases__grpo__steps": 1, "evaluation": None}

    def prepare(home: Path) -> list[str]:
        done = tiny.in_process(spec(**short)(home))
        assert done.code == 0, done.err
        return [*spec(**(short | values))(home), *flags]

    return prepare


TWELVE = (
    Case(
        "a wrong field",
        spec(("steps = 4", "stepz = 4")),
        r"{at}/tiny.toml: phases\.sft has no field 'stepz'; the nearest is 'steps'",
    ),
    Case(
        "a wrong type",
        spec(("rows = 8", 'rows = "eight"')),
        r"{at}/tiny.toml: phases\.sft\.batch\.rows must be an integer from 1 to 1048576, received the text 'eight'",
    ),
    Case(
        'lr: "1e-6" as text',
        yaml_lr,
        r"{at}/lr.yaml: phases\.sft\.optimizers\.actor\.lr must be a number above 0 and at most 1000, received the text "
        r"'1e-6'; YAML takes a number for text unless it has a point and a signed exponent, so write 1\.0e-6",
    ),
    Case(
        "a reward that does not import",
        spec(phases__grpo__rewards__0__function="my_rewardz:score"),
        r"phases\.grpo\.rewards: the reward 'my_rewardz:score' does not import \(ModuleNotFoundError: No module named "
        r"'my_rewardz'\); it is looked for in the current folder first, then among installed packages",
    ),
    Case(
        "a missing shard",
        folder(lambda path: shard(path, 1).unlink()),
        r"model: {at}/model/model\.safetensors\.index\.json does not agree with its files: it names files that "
        r"are not there: model-00002-of-\d+\.safetensors \(\d+ tensors\); copy them into the folder",
    ),
    Case(
        "a truncated file",
        folder(cut),
        r"model: {at}/model/model\.safetensors\.index\.json does not agree with its files: "
        r"{at}/model/model-00002-of-\d+\.safetensors is truncated: expected \d+ bytes by its header, it has \d+; copy it "
        r"again",
    ),
    Case(
        "heads not dividing",
        spec(model__config__num_attention_heads=3, model__config__num_key_value_heads=2),
        r"model: qwen3 configuration: num_attention_heads 3 is not a multiple of num_key_value_heads 2",
    ),
    Case(
        "an illegal pair of acquisition and feedback",
        spec(phases__sft__rewards=[{"function": "areno_fn.world.rewards:exact_match"}]),
        r"phases\.sft\.rewards: sft is dataset \+ none, so no reward is ever asked; remove the rewards, or put them under "
        r"`evaluation`",
    ),
    Case(
        "stage joins that do not fit",
        spec(),
        r"phases\.sft: score returns Scores, but .*clipped.* takes Actions.*",
        with_wrong_loss,
    ),
    Case(
        "an empty data set",
        rows("\n"),
        r"phases\.sft\.data: the data file {at}/rows\.jsonl is empty; it needs one JSON object a line",
    ),
    Case(
        "a prompt longer than the context",
        rows('{"prompt": "1+1="}\n{"prompt": "' + "1+" * 50 + '1="}\n', GRPO_DATA),
        r"phases\.grpo\.data: {at}/rows\.jsonl:2: the prompt has 103 tokens, but the context leaves 12 beside the response; "
        r"shorten the prompt, raise max_length or lower max_tokens",
    ),
    Case(
        "an output folder that cannot be written",
        unwritable,
        r"out: {at}/file/out cannot be written \({at}/file is not a folder\); choose a folder that you may write to",
    ),
)
"""What every user gets wrong once."""

MORE = (
    Case(
        "no rewards to learn from",
        spec(phases__grpo__rewards=[]),
        r"phases\.grpo\.rewards: grpo learns from runtime rewards and needs at least one, for example \{ kind = "
        r"'function', function = 'package\.module:function' \}",
    ),
    Case(
        "an unknown family",
        spec(model__family="gpt9"),
        r"model: family: there is no 'gpt9'; those of text are llama, qwen2, qwen3, those of pictures digits_dit",
    ),
    Case(
        "a field the model does not know",
        spec(("hidden_size = 32", "hidden_size = 32\nfoo = 1")),
        r"model: qwen3 configuration: the field 'foo' is unknown; remove it if the model does not depend on it",
    ),
    Case(
        "no model folder",
        folder(lambda path: path.rename(path.with_name("moved"))),
        r"model: {at}/model is not there; a Hugging Face folder is needed",
    ),
    Case(
        "no config.json",
        folder(lambda path: (path / "config.json").unlink()),
        r"model: {at}/model has no config\.json; a Hugging Face folder is needed",
    ),
    Case(
        "config.json is not JSON",
        folder(lambda path: (path / "config.json").write_text('{"model_type": ')),
        r"model: {at}/model/config\.json is not valid JSON: Expecting value: line 1 column 16 \(char 15\)",
    ),
    Case(
        "a model of other sizes than its tensors",
        folder(configured(vocab_size=260)),
        r"model: {at}/model: its tensors are not those of the model: 'lm_head\.weight' is float32 \[259, 16\], "
        r"declared \[260, 16\]; 'model\.embed_tokens\.weight' is float32 \[259, 16\], declared \[260, 16\]",
    ),
    Case(
        "heads not dividing in a folder",
        folder(configured(num_attention_heads=3, num_key_value_heads=2)),
        r"model: llama configuration: num_attention_heads 3 is not a multiple of num_key_value_heads 2",
    ),
    Case(
        "no tokenizer",
        folder(lambda path: [file.unlink() for file in path.glob("tokenizer*")]),
        r"tokenizer: {at}/model holds no tokenizer; one of tokenizer\.json, tokenizer\.model, vocab\.json, vocab\.txt is needed",
    ),
    Case(
        "a damaged tokenizer",
        folder(lambda path: (path / "tokenizer.json").write_text("{")),
        r"tokenizer: {at}/model/tokenizer\.json is damaged: Input data was truncated",
    ),
    Case(
        "a tokenizer larger than the model",
        spec(model__config__vocab_size=100),
        r"tokenizer: it has 259 tokens, but the model embeds 100; use the model's own tokenizer, or a larger vocab_size",
    ),
    Case(
        "rows longer than the model's context",
        spec(phases__sft__batch__max_length=64),
        r"phases\.sft\.batch\.max_length: 64 is beyond the model's context of 32 positions; lower it to that or less",
    ),
    Case(
        "a row longer than max_length",
        rows('{"prompt": "a", "response": "' + "b" * 20 + '"}\n'),
        r"phases\.sft\.data: {at}/rows\.jsonl:1: the row has 23 tokens \(21 of them trained\), but max_length is 16; shorten it, "
        r"raise max_length, or set overlong to 'truncate' or 'drop'",
    ),
    Case(
        "a row that is not JSON",
        rows('{"prompt": "a", "response": "b"}\nnot json\n'),
        r"phases\.sft\.data: {at}/rows\.jsonl:2: not valid JSON \(.*\); each line is one JSON object",
    ),
    Case(
        "a row nested without end",
        rows('{"prompt": "a", "response": "b", "x": ' + "[" * 50_000 + "]" * 50_000 + "}\n"),
        r"phases\.sft\.data: {at}/rows\.jsonl:1: not valid JSON \(.*\); each line is one JSON object",
    ),
    Case(
        "a row that is not UTF-8",
        rows(b'{"prompt": "\xff", "response": "b"}\n'),
        r"phases\.sft\.data: {at}/rows\.jsonl:1: not valid JSON \(.*\); each line is one JSON object",
    ),
    Case(
        "a row without a response to train on",
        rows('{"prompt": "a"}\n'),
        r"phases\.sft\.data: {at}/rows\.jsonl:1: a row with the keys prompt has nothing to train on; legal shapes are .*",
    ),
    Case(
        "no data file",
        spec((SFT_DATA, '{ kind = "jsonl", path = "{at}/none.jsonl" }')),
        r"phases\.sft\.data: the data file {at}/none\.jsonl cannot be read \(No such file or directory\); give the path of a JSONL "
        r"file",
    ),
    Case(
        "more sums than there are",
        spec(phases__sft__data__0__count=10_000),
        r"phases\.sft\.data: arithmetic\(.*\) has \d+ different sums, but count asks for 10000; lower count or raise digits",
    ),
    Case(
        "mini-batches that the last batch cannot fill",
        spec(phases__grpo__data__0__count=9, phases__grpo__algorithm__minibatches=6),
        r"phases\.grpo\.algorithm\.minibatches: 6 mini-batches cannot be cut from the last batch of an epoch, which has 1 prompts "
        r"x 4 samples \(9 prompts in batches of 4\); change batch\.rows, samples or minibatches",
    ),
    Case(
        "a rate that rises",
        spec(phases__sft__optimizers__0__schedule={"kind": "linear", "min_lr": 1.0}),
        r"phases\.sft\.optimizers: schedule 'linear' decays from lr=0\.003 to min_lr=1\.0, which is larger; lower min_lr",
    ),
    Case(
        "an optimizer for nobody",
        spec(phases__sft__optimizers__0__role="critic"),
        r"phases\.sft\.optimizers: there must be exactly one for each trained role \(actor\), received critic",
    ),
    Case(
        "sampling without chance",
        spec(phases__grpo__algorithm__sampling__temperature=0),
        r"phases\.grpo\.algorithm\.sampling\.temperature: 0 is greedy decoding, which explores nothing; use a temperature above 0",
    ),
    Case(
        "no length",
        spec(phases__sft__steps=0),
        r"phases\.sft: exactly one of `steps` and `epochs` must be at least 1, but neither is given",
    ),
    Case(
        "two phases of one name",
        spec(phases__grpo__name="sft"),
        r"phases: two phases are named 'sft'; names must differ",
    ),
    Case(
        "an evaluation without room for a prompt",
        spec(evaluation__sampling__max_tokens=32),
        r"evaluation\.sampling\.max_tokens: 32 leaves no room for a prompt in the model's context of 32 positions",
    ),
    Case(
        "a reward called like the total",
        spec(
            evaluation__rewards=[
                {"function": "areno_fn.world.rewards:exact_match", "name": "score"},
                {"function": "areno_fn.world.rewards:length_penalty"},
            ]
        ),
        r"evaluation\.rewards: 'score' is what the sum of several rewards is called; give that reward another `name`",
    ),
    Case(
        "a reward that is not there",
        spec(phases__grpo__rewards__0__function="areno_fn.world.rewards:exact_matchh"),
        r"phases\.grpo\.rewards: the reward 'areno_fn\.world\.rewards:exact_matchh' does not exist: module "
        r"'areno_fn\.world\.rewards' has no 'exact_matchh'",
    ),
    Case(
        "a reward module that leaves the process",
        module("import sys\nsys.exit(3)\n", "leaving_rewards"),
        r"phases\.grpo\.rewards: the reward 'leaving_rewards:judge' does not import \(SystemExit: 3\); it is looked for .*",
    ),
    Case(
        "a reward module with a mistake",
        module("def judge(:\n", "broken_rewards_here"),
        r"phases\.grpo\.rewards: the reward 'broken_rewards_here:judge' does not import \(SyntaxError: .*\); it is looked for .*",
    ),
    Case(
        "no specification",
        lambda home: [str(home / "none.toml")],
        r"{at}/none\.toml: no such file; `python -m areno_fn\.spec new FILE\.toml` writes one to start from",
    ),
    Case(
        "a specification of another kind",
        lambda home: [str(tiny.write_spec(home, "x", "spec.txt"))],
        r"{at}/spec\.txt: a specification file must end in \.toml, \.yaml, \.yml, \.json or \.msgpack",
    ),
    Case(
        "a field set that is not there",
        spec(phases__ppo__steps=3),
        r"--set phases\.ppo\.steps=3: phases has no item 'ppo'; its items are sft, grpo",
    ),
    Case(
        "a run in the output folder",
        occupied(),
        r"out: {at}/out already holds a run \(checkpoints\); pass --resume to continue it, --overwrite to start it afresh, or "
        r"choose another folder",
    ),
    Case(
        "another run in the output folder",
        occupied("--resume", seed=5),
        r"{at}/out/checkpoints/step-00000002 belongs to another run: seed was 0 and is now 5; resume with the specification it was "
        r"started with, or pass --accept seed",
    ),
    Case(
        "both ways to treat a run",
        lambda home: [*spec()(home), "--resume", "--overwrite"],
        r"--resume continues the run in the output folder and --overwrite deletes it; pass one of them",
    ),
    Case(
        "an output folder in a file system that takes none",
        lambda home: [*spec()(home)[:2], "/proc/nothing/out"],
        r"out: /proc/nothing/out cannot be written \(/proc/nothing: No such file or directory\); choose a folder that you may "
        r"write to",
    ),
)
"""Mistakes of all kinds."""

NO_CUDA = Case(
    "a device that is not there",
    spec(device="cuda"),
    r"device: 'cuda' was asked for, but torch sees no CUDA device; use 'cpu' or 'auto'",
)


def sentence(case: Case, home: Path) -> tuple[int, str]:
    """Makes a mistake in an empty folder; returns the exit code and what is said of it."""
    words = case.prepare(home)
    said = io.StringIO()
    # a reward of one's own is looked for in the current folder
    with contextlib.chdir(home), contextlib.redirect_stderr(said):
        code = main(case.command, words)
    return code, said.getvalue().replace(str(home), "WORK")


def show(cases: Sequence[Case]) -> int:
    wrong = 0
    for number, case in enumerate(cases, 1):
        with tempfile.TemporaryDirectory() as home:
            code, said = sentence(case, Path(home))
        wrong += code != 2 or said.count("\n") != 1
        print(f"{number:2}. {case.name} (exit {code})\n    {said.strip()}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(show([*TWELVE, *MORE] if "--all" in sys.argv else TWELVE))
