"""The trained model as a Hugging Face folder, and its adapter, if it has one, as a PEFT folder.

The folder of a flow model is that of its transformer in diffusers; one that came from a pipeline is the whole pipeline. Of
several transformers each has a folder of its name, and so have their adapters.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from areno_fn.ckpt import hf
from areno_fn.ckpt.diffusers_lora import LOADED_INTO
from areno_fn.ckpt.pipeline_save import save_pipeline
from areno_fn.contracts.spec import HFTokenizer
from areno_fn.contracts.state import TrainState
from areno_fn.engine.adapter_files import adapter_folder, save_adapter
from areno_fn.engine.finetune import LoraPlan
from areno_fn.engine.plan import Plan
from areno_fn.engine.tokenizer_files import PATTERNS, tokenizer_files
from areno_fn.engine.weights import Weights, own_part
from areno_fn.models.adapters import Adapters
from areno_fn.steps.optimizers.master import in_full
from areno_fn.steps.recipes import ACTOR, CRITIC
from areno_fn.world import tokenizer_export

ADAPTER = "adapter"
"""Name of the adapter's folder beside the exported model: PEFT's, and for a pipeline also diffusers'."""


AVERAGED = "_ema"
"""What the names of these two folders end in where they hold the average."""


def export(plan: Plan, state: TrainState, folder: Path) -> Path:
    """Writes the trained model, with the tokenizer that it was trained with and everything else its source folder holds.

    Adapters are merged into it; they are written by themselves too, into the folder `adapter` beside it. Other roles
    are left out, but for those that the specification names, which stand beside it too.

    What is stored in less than float32 is written from its float32 masters, rounded once to the dtype of the file.

    An average that the last phase keeps to be exported is written as the actor is, from its own numbers, into folders
    that are called the same with `_ema` behind.
    """
    for role in plan.spec.export.roles:
        if role == CRITIC:
            _export_critic(plan, state, folder.with_name(CRITIC))
        else:
            _export_copy(plan, state, role, folder.with_name(role))
    if exports_average(plan):
        _export_actor(plan, plan.phases[-1].averaged(state, wide=True), folder, AVERAGED)
    whole = in_full(state.params[ACTOR], state.optim.get(ACTOR))
    return _export_actor(plan, {**state.params, ACTOR: whole}, folder)


def exports_average(plan: Plan) -> bool:
    """Whether a run leaves an average behind."""
    ema = plan.phases[-1].spec.ema
    return ema is not None and ema.export


def _export_actor(plan: Plan, params: Mapping[str, Any], folder: Path, ending: str = "") -> Path:
    target, pipeline = folder.with_name(folder.name + ending), plan.model.pipeline
    if isinstance(plan.finetune, LoraPlan):
        _export_adapters(plan.finetune, params[ACTOR], folder.with_name(ADAPTER + ending))
    merged = plan.finetune.merged(params, partial(_written_dtype, plan))
    if pipeline is None:
        return _write_model(plan, merged, target)
    others = {name: where for name, where in pipeline.folders.items() if name not in pipeline.trained}
    trained = {part.name: partial(_write_part, plan, part, merged) for part in plan.model.weights if part.trained}
    return save_pipeline(target, pipeline.root, others, trained)


def _export_adapters(finetune: LoraPlan, adapters: Adapters, folder: Path) -> None:
    """Writes a PEFT folder, or one for every transformer of a pipeline that is trained."""
    part = None if finetune.model.pipeline is None else LOADED_INTO
    for prefix, config in finetune.configs.items():
        save_adapter(Path(adapter_folder(folder, prefix)), config, own_part(adapters, prefix), part)


def _export_copy(plan: Plan, state: TrainState, role: str, folder: Path) -> Path:
    """Writes a role that began as a copy of the actor, as the actor is written; its adapter is merged only."""
    whole = in_full(state.params[role], state.optim.get(role))
    merged = plan.finetune.merged({**state.params, ACTOR: whole}, partial(_written_dtype, plan))
    return _write_model(plan, merged, folder)


def _write_model(plan: Plan, merged: Any, folder: Path) -> Path:
    """Writes the folder of a model, or of every transformer of a pipeline that has several."""
    for part in plan.model.weights:
        _write_part(plan, part, merged, folder / part.prefix.removesuffix("."))
    if not plan.model.weights:
        own = _tokenizer_files(plan)
        hf.save(
            folder,
            merged,
            plan.model.layout,
            _with_end_tokens(plan, plan.model.hf_config),
            naming=plan.model.naming,
            dtype=plan.spec.export.dtype,
            shard_bytes=plan.spec.export.shard_bytes,
            files=own,
            without=PATTERNS if own else (),
        )
    return folder


def _write_part(plan: Plan, part: Weights, merged: Any, folder: Path) -> None:
    own = _tokenizer_files(plan)
    hf.save(
        folder,
        part.own(merged),
        part.layout,
        part.config,
        source=part.folder,
        dtype=plan.spec.export.dtype,
        left_out=part.left_out,
        shard_bytes=plan.spec.export.shard_bytes,
        files=own,
        without=PATTERNS if own else (),
    )


def _export_critic(plan: Plan, state: TrainState, folder: Path) -> None:
    """Writes the critic as a classification folder with one label, with the actor's tokenizer, whose tokens it reads."""
    critic, source = plan.critic, plan.model.folder
    assert critic is not None, "the plan refused a role that no phase trains"
    hf.save(
        folder,
        critic.merged({**state.params, CRITIC: in_full(state.params[CRITIC], state.optim.get(CRITIC))}),
        critic.layout,
        critic.hf_config if source else _with_end_tokens(plan, critic.hf_config),
        dtype=plan.spec.export.dtype,
        shard_bytes=plan.spec.export.shard_bytes,
        files=_tokenizer_files(plan) or (_read(source.path) if source else {}),
    )


def _written_dtype(plan: Plan, path: str) -> torch.dtype:
    """The dtype that a parameter will have in the file, so that a merged weight is rounded to it once."""
    return hf.converted(plan.model.stored(path), plan.spec.export.dtype)


def _with_end_tokens(plan: Plan, hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model from scratch learns from its tokenizer, where it has one, which tokens begin, end and fill up a text."""
    if plan.tokenizer is None:
        return hf_config
    eos, pad = list(plan.tokenizer.eos_ids), plan.tokenizer.pad_id
    filled = {} if pad is None or pad >= plan.model.token_policy.vocab_size else {"pad_token_id": pad}
    return {
        **hf_config,
        **filled,
        "bos_token_id": plan.tokenizer.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
    }


def _tokenizer_files(plan: Plan) -> dict[str, bytes]:
    """The tokenizer's files by name; none where it is the source folder's own, which travels with the folder, or there is none."""
    spec = plan.spec.tokenizer
    if plan.tokenizer is None:
        return {}
    if isinstance(spec, HFTokenizer):
        return _read(Path(spec.path))
    if spec is None and plan.model.folder is not None:
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer_export.export(scratch)
        return _read(Path(scratch))


def _read(folder: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in tokenizer_files(folder).items()}
