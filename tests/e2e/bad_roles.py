"""Wrong specifications over roles, optimizers, rewards and data, and what is said of them.

    python tests/e2e/bad_roles.py

prints a sentence for each, as the command line does. Every one is found before a weight is read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import reward_folders
from e2e import tiny
from e2e.bad_inputs import GRPO_DATA, SCRATCH, SFT_DATA, Case, configured, module, rows, show, spec, write_model
from safetensors.torch import load_file, save_file

ADAMW = {"kind": "adamw", "lr": 0.003}
CRITIC = {**ADAMW, "role": "critic"}
PPO = {"kind": "ppo", "samples": 2, "sampling": {"max_tokens": 4}}
EXACT = {"kind": "function", "function": "areno_fn.world.rewards:exact_match"}


def optimizers(*given: dict[str, Any], **values: Any) -> Callable[[Path], list[str]]:
    """The optimizers of the second phase."""
    return spec(phases__grpo__optimizers=list(given), **values)


def group(name: str, *paths: str) -> dict[str, Any]:
    return {"name": name, "paths": list(paths), "lr": 0.01, "weight_decay": 0.0}


def ppo(*moved: dict[str, Any], **values: Any) -> Callable[[Path], list[str]]:
    """The second phase with the algorithm PPO."""
    return optimizers(*(moved or (ADAMW, CRITIC)), phases__grpo__algorithm=PPO, **values)


def judged(change: Callable[[Path], object] = lambda path: None, **fields: Any) -> Callable[[Path], list[str]]:
    """The second phase with a reward model to which something has happened."""

    def prepare(home: Path) -> list[str]:
        reward_folders.write(home / "judge")
        change(home / "judge")
        reward = {"kind": "model", "path": str(home / "judge"), **fields}
        return spec(phases__grpo__rewards=[reward])(home)

    return prepare


def without_head(path: Path) -> None:
    file = path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if name != "score.weight"}
    save_file(kept, file, metadata={"format": "pt"})


def critic_folder(home: Path) -> list[str]:
    write_model(home / "model")
    return ppo(phases__grpo__algorithm__critic__path=str(home / "model"))(home)


def adapted_critic(home: Path) -> list[str]:
    reward_folders.write(home / "judge")
    lora = spec((SCRATCH, SCRATCH + '[finetune]\nkind = "lora"\n\n'))
    path = str(home / "judge")
    given = {"phases.grpo.algorithm": {**PPO, "critic": {"path": path}}, "phases.grpo.optimizers": [ADAMW, CRITIC]}
    return [*lora(home), *tiny.changes(given)]


def parquet(table: dict[str, list[Any]], **source: Any) -> Callable[[Path], list[str]]:
    """The second phase on a Parquet file."""

    def prepare(home: Path) -> list[str]:
        pyarrow.parquet.write_table(pyarrow.table(table), home / "rows.parquet")
        data = {"kind": "parquet", "path": str(home / "rows.parquet"), **source}
        return spec(phases__grpo__data=[data])(home)

    return prepare


def dpo(line: dict[str, Any], **algorithm: Any) -> Callable[[Path], list[str]]:
    """The first phase as DPO on one row."""
    return rows(f"{json.dumps(line)}\n", phases__sft__algorithm={"kind": "dpo", **algorithm})


PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
SUMS = {"kind": "arithmetic", "digits": 1, "count": 10}

ROLES = (
    Case(
        "no optimizer for the critic",
        ppo(ADAMW),
        r"phases\.grpo\.optimizers: there must be exactly one for each trained role \(actor, critic\), received "
        r"actor",
    ),
    Case(
        "two optimizers for one role",
        optimizers(ADAMW, {"kind": "sgd"}),
        r"phases\.grpo\.optimizers: there must be exactly one for each trained role \(actor\), received actor, actor",
    ),
    Case(
        "an optimizer for the frozen reference",
        optimizers(ADAMW, {**ADAMW, "role": "reference"}),
        r"phases\.grpo\.optimizers: there must be exactly one for each trained role \(actor\), received actor, "
        r"reference",
    ),
    Case(
        "an optimizer for a reward model",
        optimizers(ADAMW, {**ADAMW, "role": "reward"}),
        r"phases\.grpo\.optimizers: there must be exactly one for each trained role \(actor\), received actor, "
        r"reward",
    ),
    Case(
        "an optimizer for a role that there is not",
        ppo(ADAMW, CRITIC, {**ADAMW, "role": "crtic"}),
        r"phases\.grpo\.optimizers: there must be exactly one for each trained role \(actor, critic\), received "
        r"actor, critic, crtic",
    ),
    Case(
        "a critic from a folder of another kind",
        critic_folder,
        r"phases\.grpo\.algorithm\.critic\.path: {at}/model: architectures is \['LlamaForCausalLM'\], but a "
        r"model with one number a text is a "
        r"\.\.\.ForSequenceClassification",
    ),
    Case(
        "a critic of its own beside adapters",
        adapted_critic,
        r"phases\.grpo\.algorithm\.critic\.path: with finetune = 'lora' the critic stands on the same frozen "
        r"model as the actor; "
        r"remove the path, or train in full",
    ),
    Case(
        "a critic that is trained alone to the end",
        ppo(phases__grpo__algorithm__critic__warmup=4),
        r"phases\.grpo\.algorithm\.critic\.warmup: the critic would be trained alone for all 4 steps of the "
        r"phase; use fewer than that",
    ),
    Case(
        "an average that forgets more than it knows",
        spec(phases__grpo__ema={"decay": 1.5}),
        r"--set phases\.grpo\.ema=.*: phases\.grpo\.ema\.decay must be a number above 0 and below 1, received the "
        r"number 1\.5",
    ),
    Case(
        "an average that nobody asks for",
        spec(phases__grpo__ema={"export": False}, evaluation=None),
        r"phases\.grpo\.ema: it is neither exported nor evaluated; set `export`, or `evaluate` with an "
        r"`evaluation`, or remove this",
    ),
    Case(
        "a snapshot that the phase does not keep",
        spec(phases__grpo__offload=["ema"]),
        r"phases\.grpo\.offload: this phase keeps no 'ema'; it keeps 'reference'",
    ),
    Case(
        "an export of a role that is not trained",
        spec(export__roles=["critic"]),
        r"export\.roles\.0: beside the actor, which is always written, this run trains no role; remove 'critic'",
    ),
)
"""Roles, and who moves them."""

OPTIMIZERS = (
    Case(
        "an embedding in Muon",
        optimizers({"kind": "muon", "groups": [group("words", "embed")]}),
        r"phases\.grpo\.optimizers: actor: the group 'words' gives embed to Muon, which moves hidden matrices "
        r"alone; put the group "
        r"under `adamw`",
    ),
    Case(
        "a group that names nothing",
        optimizers({**ADAMW, "groups": [group("late", "layers.7.*")]}),
        r"phases\.grpo\.optimizers: actor: the group 'late' asks for 'layers\.7\.\*', which names no parameter; "
        r"they are embed, .* and "
        r"so on",
    ),
    Case(
        "a parameter in two groups",
        optimizers({**ADAMW, "groups": [group("first", "layers.0.*"), group("norms", "*norm")]}),
        r"phases\.grpo\.optimizers: parameter layers\.0\.\S*norm is in the groups 'first' and 'norms'; one may "
        r"own it",
    ),
    Case(
        "a group called like an optimizer",
        optimizers({**ADAMW, "groups": [group("adamw", "embed")]}),
        r"phases\.grpo\.optimizers\.actor\.groups: 'adamw' is what an optimizer calls the parameters of no "
        r"group; name the group "
        r"differently",
    ),
    Case(
        "momentum that is not there",
        optimizers({"kind": "sgd", "momentum": 0.0, "nesterov": True}),
        r"phases\.grpo\.optimizers\.actor\.nesterov: there is no momentum to look ahead along; set momentum "
        r"above 0, or nesterov to "
        r"false",
    ),
    Case(
        "a KL in the reward without a coefficient",
        spec(phases__grpo__algorithm__kl_coef=0.0, phases__grpo__algorithm__kl_in="reward"),
        r"phases\.grpo\.algorithm\.kl_in: without kl_coef no KL is taken from the loss or the reward; give kl_coef, "
        r"or remove this",
    ),
    Case(
        "a coefficient that follows no KL",
        ppo(phases__grpo__algorithm__kl_target=1.0),
        r"phases\.grpo\.algorithm\.kl_target: it moves the coefficient of the KL in the reward; give kl_coef, "
        r"and kl_in = 'reward'",
    ),
    Case(
        "label smoothing of another loss",
        dpo(PAIR, loss="ipo", label_smoothing=0.1),
        r"phases\.sft\.algorithm\.label_smoothing: it belongs to the loss 'sigmoid'; remove it, or `loss`",
    ),
    Case(
        "more mini-batches than samples",
        spec(phases__grpo__algorithm__minibatches=17),
        r"phases\.grpo\.algorithm\.minibatches: 17 mini-batches cannot be cut from 4 prompts x 4 samples",
    ),
)
"""Optimizers, and the numbers of losses."""

REWARDS = (
    Case(
        "a reward of one argument",
        module("def judge(rows):\n    return []\n", "rewards_of_one_argument"),
        r"phases\.grpo\.rewards: the reward 'rewards_of_one_argument:judge' does not say what it is to be called with "
        r"\(its parameters are \(rows\)\); it must have the parameters \(rows, completions\), \(row, completions\) or "
        r"\(row, completion\), in any order, and a default for every other",
    ),
    Case(
        "a reward class that needs arguments",
        module("class judge:\n    def __init__(self, path):\n        pass\n", "rewards_with_arguments"),
        r"phases\.grpo\.rewards: the reward 'rewards_with_arguments:judge' is a class and cannot be made "
        r"without arguments "
        r"\(TypeError: .* missing 1 required positional argument: 'path'\)",
    ),
    Case(
        "a reward of an unknown kind",
        spec(phases__grpo__rewards=[{"kind": "modle", "path": "x"}]),
        r"--set phases\.grpo\.rewards=.*: phases\.grpo\.rewards\.0\.kind must be 'function', 'model', 'clip' or 'http', "
        r"received the text 'modle'",
    ),
    Case(
        "a reward model that is not there",
        spec(phases__grpo__rewards=[{"kind": "model", "path": "no/such/folder"}]),
        r"phases\.grpo\.rewards: no/such/folder is not there; a Hugging Face folder is needed",
    ),
    Case(
        "a reward model of two labels",
        judged(configured(id2label={"0": "bad", "1": "good"})),
        r"phases\.grpo\.rewards: {at}/judge: the model has 2 labels, but one that gives a text one number has 1",
    ),
    Case(
        "a language model for a reward model",
        judged(configured(architectures=["LlamaForCausalLM"])),
        r"phases\.grpo\.rewards: {at}/judge: architectures is \['LlamaForCausalLM'\], but a model with one "
        r"number a text is a "
        r"\.\.\.ForSequenceClassification",
    ),
    Case(
        "a reward model without a head",
        judged(without_head),
        r"phases\.grpo\.rewards: {at}/judge: its tensors are not those of the model: 'score\.weight' is missing",
    ),
    Case(
        "a reward model without a tokenizer",
        judged(lambda path: [file.unlink() for file in path.glob("tokenizer*")]),
        r"phases\.grpo\.rewards: {at}/judge holds no tokenizer; one of tokenizer\.json, tokenizer\.model, "
        r"vocab\.json, vocab\.txt is "
        r"needed",
    ),
    Case(
        "a reward model that is too short",
        judged(configured(max_position_embeddings=8)),
        r"phases\.grpo\.rewards: the reward model {at}/judge has 8 positions, but the prompt of "
        r"arithmetic\(.*\):1 and a completion "
        r"need 9; shorten the prompt, or lower max_tokens",
    ),
    Case(
        "a reward for data that are not there",
        spec(phases__grpo__rewards=[{**EXACT, "data": ["sums"]}]),
        r"phases\.grpo\.rewards\.0\.data: there is no data set 'sums' in phases\.grpo\.data; those there are "
        r"called 0",
    ),
    Case(
        "data that no reward judges",
        spec(phases__grpo__rewards=[{**EXACT, "data": ["a"]}], phases__grpo__data=[SUMS | {"name": n} for n in "ab"]),
        r"phases\.grpo\.rewards: none of them judges the data set 'b', so all its samples would be worth 0; "
        r"add it to the `data` of "
        r"one, or leave that list empty",
    ),
)
"""Rewards: functions and models."""

DATA = (
    Case(
        "a row without a prompt",
        rows('{"prompt": "1+1="}\n{"text": "1+1=2", "answer": "2"}\n', GRPO_DATA),
        r"phases\.grpo\.data: {at}/rows\.jsonl:2: a row with the keys answer, text has no prompt; give 'prompt' "
        r"or 'question', or "
        r"rename a key with `columns`; the row is \{\"text\": \"1\+1=2\", \"answer\": \"2\"\}",
    ),
    Case(
        "a pair with one answer",
        dpo({"prompt": "1+1=", "chosen": "2"}),
        r"phases\.sft\.data: {at}/rows\.jsonl:1: a row with the keys chosen, prompt has no 'rejected'; legal are .*; "
        r"the row is \{\"prompt\": \"1\+1=\", \"chosen\": \"2\"\}",
    ),
    Case(
        "a response that is a number",
        rows('{"prompt": "1+1=", "response": 2}\n', SFT_DATA),
        r"phases\.sft\.data: {at}/rows\.jsonl:1: 'response' must be text, received int; the row is "
        r"\{\"prompt\": \"1\+1=\", \"response\": 2\}",
    ),
    Case(
        "a mixture that lacks a weight",
        spec(phases__grpo__data=[{**SUMS, "weight": 1.0}, {**SUMS, "seed": 1}]),
        r"phases\.grpo\.data\.1\.weight: the other data sets have weights, so this one needs one above 0, or "
        r"none of them any",
    ),
    Case(
        "a Parquet file without the column",
        parquet({"ask": ["1+1="]}, columns={"prompt": "question"}),
        r"phases\.grpo\.data: {at}/rows\.parquet:1: there is no 'question' for `columns` to rename.*",
    ),
    Case(
        "a Parquet file without a prompt",
        parquet({"ask": ["1+1="], "answer": ["2"]}),
        r"phases\.grpo\.data: {at}/rows\.parquet:1: a row with the keys answer, ask has no known shape; .* the "
        r"row is \{.*\}",
    ),
    Case(
        "a conversation that the assistant begins",
        rows('{"messages": [{"role": "assistant", "content": "hello"}]}\n', SFT_DATA),
        r"phases\.sft\.data: {at}/rows\.jsonl:1: messages begins with the assistant; a conversation begins with "
        r"a system or user turn",
    ),
)
"""Rows, and what is made of them."""

ALL = (*ROLES, *OPTIMIZERS, *REWARDS, *DATA)

if __name__ == "__main__":
    sys.exit(show(ALL))
