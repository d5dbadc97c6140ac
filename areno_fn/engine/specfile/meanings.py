"""What each field of a specification means, in a few words; starters and the JSON schema show them."""

from __future__ import annotations

from typing import Any

import msgspec

from areno_fn.contracts import spec
from areno_fn.engine.specfile.flow_meanings import FLOW_MEANINGS
from areno_fn.engine.specfile.types import fields, root, structs

_SHARED = {
    "name": "by which rewards refer to it",
    "weight": "its share of an epoch, beside the other weights; 0 everywhere reads every row once",
}
_STORED = {
    "columns": "wanted = theirs, where columns have other names",
    "limit": "first rows that are read; 0: all",
    **_SHARED,
}

_OPTIMIZER = {
    "decay": "which weights decay: matrices, hidden ones only, or all",
    "max_grad_norm": "gradients are scaled down to this norm; 0 never",
    "schedule": "of the learning rate",
    "groups": "parameters with a rate and a decay of their own",
}

_SAMPLED = {
    "samples": "completions of each prompt, the group",
    "sampling": "how they are drawn",
    "kl_coef": "weight of the KL to the phase's start; 0 keeps no reference",
    "kl_in": "added to the loss of each token, or taken from the reward of a completion",
    "kl_estimator": "of that KL",
    "reference_every": "iterations after which the reference becomes the actor; 0: never",
    "entropy_coef": "weight of the entropy of every token's distribution, which is maximised; 0: none",
    "mask_truncated": "ignore completions that hit max_tokens",
    "minibatches": "optimizer steps on one rollout",
    "epochs": "passes over one rollout",
}

_GROUPED = _SAMPLED | {
    "baseline": "what a reward is compared with",
    "scale": "advantages are divided by this standard deviation",
}

MEANINGS: dict[str, dict[str, str]] = {
    "RunSpec": {
        "version": "of this file format",
        "name": "what the run is called",
        "seed": "of everything random in the run",
        "out": "folder for results; --out overrides it",
        "device": "auto takes a GPU where there is one",
        "model": "what is trained",
        "consistency": "of a rollout's log-probabilities with training's: up to roundings, or every bit",
        "finetune": 'all of it, or adapters beside it; `finetune = "lora"` takes the defaults',
        "tokenizer": "when absent, that of the model's folder",
        "phases": "run in this order on one state",
        "evaluation": "when absent, nothing is evaluated",
        "checkpoint": "what --resume continues from",
        "export": "the Hugging Face folder at the end",
        "log": "what is recorded on the way",
    },
    "ScratchModel": {
        "family": "architecture, for example llama or qwen3",
        "config": "fields of the family's Hugging Face config.json",
    },
    "HFModel": {
        "path": "folder with config.json and safetensors files",
        "dtype": "of the parameters in memory; source keeps each file's own",
        "pipeline": "of a pipeline of diffusers: what it makes, and with which frozen parts",
    },
    "HFTokenizer": {"path": "folder with tokenizer.json"},
    "JsonlData": {"path": "file with one JSON object a line", **_STORED},
    "ParquetData": {"path": "a Parquet file", **_STORED},
    "HFData": {
        "path": "folder that datasets saved, or of Parquet or JSONL files named after their splits",
        **_STORED,
        "split": "of the folder; when empty, train, or the only one",
    },
    "ArithmeticData": {
        "digits": "digits of each summand",
        "count": "rows",
        "split": "no sum is in both",
        "seed": "chooses the sums",
        **_SHARED,
    },
    "DigitsData": {
        "split": "no picture is in both",
        "limit": "first pictures that are read; 0: all",
        **_SHARED,
    },
    "DigitPairsData": {
        "split": "no picture is in both",
        "limit": "first pairs that are read; 0: all",
        **_SHARED,
    },
    "FunctionReward": {
        "function": "package.module:function, called with rows and completions, or rows and pictures",
        "weight": "factor in the total",
        "name": "in the metrics; when empty, the function's own",
        "data": "names of the data sets whose rows it judges; when empty, all",
        "timeout": "seconds that a call may take; 0: no limit",
        "concurrency": "calls of an async function that wait at once; 0: 16",
    },
    "ModelReward": {
        "path": "folder with config.json, safetensors files and a tokenizer",
        "dtype": "of its parameters in memory; source keeps each file's own",
        "weight": "factor in the total",
        "name": "in the metrics; when empty, the folder's own",
        "data": "names of the data sets whose rows it judges; when empty, all",
        "shift": "taken off every value, before the clip",
        "clip": "values are kept from -clip to clip; 0: as they are",
        "micro_tokens": "most tokens that it reads at once",
    },
    "ClipReward": {
        "path": "folder of a CLIP model, with its processor",
        "prompt": "the text that pictures are to fit, with fields of the row in braces",
        "scaled": "times the model's own temperature, as PickScore is meant",
        "weight": "factor in the total",
        "name": "in the metrics; when empty, the folder's own",
        "data": "names of the data sets whose rows it judges; when empty, all",
        "batch": "pictures that it reads at once",
    },
    "HttpReward": {
        "url": "where rows and samples are posted to, as JSON",
        "weight": "factor in the total",
        "name": "in the metrics; when empty, the address",
        "data": "names of the data sets whose rows it judges; when empty, all",
        "batch": "samples that are sent at once",
        "timeout": "seconds that an answer may take",
        "retries": "further attempts where none came",
    },
    "Sampling": {
        "max_tokens": "longest completion",
        "temperature": "0 is greedy, for evaluation only",
        "top_k": "most likely tokens kept; 0 keeps all",
        "top_p": "probability mass kept",
        "min_p": "least probability kept, relative to the likeliest token",
    },
    "Schedule": {
        "kind": "how the learning rate falls after warm-up",
        "warmup_steps": "optimizer steps from 0 to lr",
        "stable_steps": "at lr before the decay, for wsd",
        "decay_steps": "0 means all steps of the phase",
        "min_lr": "where the decay ends",
    },
    "AdamWSpec": {
        "role": "whose parameters it updates",
        "lr": "highest learning rate",
        "betas": "decay of the two moments",
        "eps": "added to the root of the second moment",
        "weight_decay": "times the learning rate, taken off every weight that decays",
        "states": "moments and masters in float32; stored: moments in the dtype of the parameters, no masters",
        **_OPTIMIZER,
    },
    "AdamW8bitSpec": {
        "role": "whose parameters it updates",
        "lr": "highest learning rate",
        "betas": "decay of the two moments",
        "eps": "added to the root of the second moment",
        "weight_decay": "times the learning rate, taken off every weight that decays",
        **_OPTIMIZER,
    },
    "SGDSpec": {
        "role": "whose parameters it updates",
        "lr": "highest learning rate",
        "momentum": "decay of the sum of gradients; 0 keeps none",
        "nesterov": "look ahead along the sum",
        "weight_decay": "times the weight, added to the gradient",
        **_OPTIMIZER,
    },
    "MuonSpec": {
        "role": "whose parameters it updates",
        "lr": "highest learning rate of hidden matrices",
        "momentum": "decay of the mean of gradients",
        "nesterov": "look ahead along the mean",
        "adjust": "the rate by a matrix's shape; with match_rms_adamw, that of AdamW serves",
        "iterations": "Newton-Schulz steps to the orthogonal factor",
        "weight_decay": "of hidden matrices, times the learning rate",
        **{name: words for name, words in _OPTIMIZER.items() if name != "decay"},
        "adamw": "for embeddings, heads, norms and biases",
    },
    "Remainder": {
        "lr": "highest learning rate",
        "betas": "decay of the two moments",
        "eps": "added to the root of the second moment",
        "weight_decay": "times the learning rate, taken off every weight that decays",
        "decay": _OPTIMIZER["decay"],
        "groups": _OPTIMIZER["groups"],
    },
    "Group": {
        "name": "what the group is called",
        "paths": "patterns of paths in the parameter tree; * stands for anything",
        "lr": "highest learning rate",
        "weight_decay": "on all of the group",
    },
    "SFT": {"aggregation": "how the losses of tokens become one"},
    "DPO": {
        "loss": "sigmoid is DPO; ipo goes by the mean over an answer",
        "beta": "how dear a distance from the phase's start is",
        "label_smoothing": "share of pairs taken to be swapped; sigmoid only",
        "reference_every": "steps after which the reference becomes the actor; 0: never",
    },
    "GRPO": {
        **_GROUPED,
        "clip_low": "the ratio is clipped below 1 - clip_low",
        "clip_high": "and above 1 + clip_high",
        "dual_clip": "most that a ratio counts for a bad completion; 0: no bound",
        "importance_cap": "most that a token is weighted by its training over rollout probability; 0: unweighted",
        "aggregation": "how the losses of tokens become one",
    },
    "GSPO": {
        **_GROUPED,
        "clip_low": "the ratio of a completion is clipped below 1 - clip_low",
        "clip_high": "and above 1 + clip_high",
        "importance_cap": "most that a completion is weighted by its training over rollout probability; 0: unweighted",
    },
    "PPO": {
        **_SAMPLED,
        "samples": "completions of each prompt",
        "kl_in": "added to the loss of each token, or taken from its reward",
        "kl_target": "KL of a completion that kl_coef is moved towards; 0 leaves it as it is",
        "kl_horizon": "completions in which it may move by a fifth",
        "critic": "the role that estimates what a completion will be worth",
        "gamma": "discount of a token",
        "lam": "weight of longer estimates: 0 one step, 1 the whole return",
        "whiten": "advantages of a rollout get mean 0 and deviation 1",
        "clip_low": "the ratio is clipped below 1 - clip_low",
        "clip_high": "and above 1 + clip_high",
        "dual_clip": "most that a ratio counts for a bad token; 0: no bound",
        "importance_cap": "most that a token is weighted by its training over rollout probability; 0: unweighted",
        "aggregation": "how the losses of tokens become one",
    },
    "Critic": {
        "path": "classification folder with one label to start from; when empty, the actor",
        "updates": "for each update of the actor",
        "warmup": "iterations in which it is trained alone",
        "clip": "how far a value may move from what it was",
        "coef": "weight of its loss",
    },
    "Batch": {
        "rows": "rows of data, or prompts, a step",
        "micro_tokens": "most tokens at once; bounds memory, changes no result",
        "micro_rows": "most pictures at once; bounds memory, changes no result; 0: all of an update",
        "max_length": "most tokens of prompt and response",
        "overlong": "what happens to a longer training row",
    },
    "Evaluation": {
        "data": "held-out rows",
        "rewards": "what their completions are judged by",
        "sampling": "how completions are drawn",
        "denoising": "how a flow model draws instead",
        "every": "steps between evaluations; 0 only before and after a phase",
        "limit": "most rows evaluated; 0 all",
        "batch": "rows decoded at once",
    },
    "Phase": {
        "name": "of the phase, in metrics and --set",
        "algorithm": "what is optimised",
        "data": "what it reads; without weights, every row once an epoch",
        "steps": "optimizer steps, or rollouts; give this",
        "epochs": "or passes over the data",
        "stop_at": "end early once an evaluation scores this; 0: never",
        "denoising": "how its evaluations draw instead of evaluation.denoising",
        "batch": "how much goes into a step",
        "optimizers": "one for each trained role",
        "rewards": "what samples are judged by, summed by weight",
        "ema": "an average of the actor beside it; when absent, none",
        "offload": "snapshots that stay in host memory between their uses; changes no result",
        "remat": "every so many-th layer is computed again for its gradient, not kept: 0 none, 1 all, 2 half",
        "capture": "updates are replayed as graphs of a GPU, of batches padded to few sizes; changes roundings alone",
    },
    "EMA": {
        "decay": "share of the average that stays at an update",
        "schedule": "of the decay: constant, or rising from about 0",
        "ramp": "updates until the decay is reached; linear only",
        "every": "optimizer steps between updates",
        "start": "optimizer steps up to which an update copies the actor",
        "evaluate": "evaluations are made with the average too",
        "export": "it is written at the end, beside the trained model",
    },
    "Lora": {
        "rank": "of the change of each weight",
        "alpha": "the change counts alpha / rank",
        "targets": "linear maps that get an adapter; when empty, all of the layers",
        "rslora": "the change counts alpha / sqrt(rank) instead",
        "adapter": "PEFT folder to start from; when empty, a new adapter",
        "merge_rollouts": "draw with merged weights: faster, equal to training up to roundings only",
    },
    "Checkpoint": {"every": "steps between checkpoints; 0 only at the end of a phase", "keep": "newest ones that stay"},
    "Export": {
        "dtype": "source keeps that of the model read",
        "roles": "others to write too, each into a folder of its name, such as critic",
        "shard_bytes": "largest weight file",
    },
    "Log": {
        "tensorboard": "write TensorBoard event files",
        "samples": "completions shown and kept each time",
        "samples_every": "steps between them; those of the first step are always recorded",
    },
    **FLOW_MEANINGS,
}


def meaning(struct: type, field: str) -> str:
    """What a field means."""
    return MEANINGS[struct.__name__][field]


def schema() -> dict[str, Any]:
    """The JSON schema of a specification, with the meaning of every field as its description."""
    whole = msgspec.json.schema(spec.RunSpec)
    for name, table in whole["$defs"].items():
        for field, words in MEANINGS.get(name, {}).items():
            table["properties"][field]["description"] = words
    kinds = [info.tag for info in structs(fields(root())["finetune"])]
    whole["$defs"]["RunSpec"]["properties"]["finetune"]["anyOf"].append({"enum": kinds})
    return whole
