"""The trained model as a Hugging Face folder."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areno_fn.ckpt import hf
from areno_fn.contracts.spec import HFTokenizer
from areno_fn.contracts.state import TrainState
from areno_fn.engine.plan import Plan
from areno_fn.steps.recipes import ACTOR
from areno_fn.world import tokenizer_export

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)


def export(plan: Plan, state: TrainState, folder: Path) -> Path:
    """Writes the actor, with the tokenizer and everything else its source folder had beside its weights."""
    from_scratch = plan.model.folder is None
    return hf.save(
        folder,
        state.params[ACTOR],
        plan.model.layout,
        _with_end_tokens(plan) if from_scratch else plan.model.hf_config,
        source=plan.model.folder,
        dtype=plan.spec.export.dtype,
        shard_bytes=plan.spec.export.shard_bytes,
        files=_tokenizer_files(plan) if from_scratch else None,
    )


def _with_end_tokens(plan: Plan) -> Mapping[str, Any]:
    """A model from scratch learns which tokens begin and end a text from its tokenizer."""
    eos = list(plan.tokenizer.eos_ids)
    return {
        **plan.model.hf_config,
        "bos_token_id": plan.tokenizer.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
    }


def _tokenizer_files(plan: Plan) -> dict[str, bytes]:
    spec = plan.spec.tokenizer
    if isinstance(spec, HFTokenizer):
        return _read(Path(spec.path), _TOKENIZER_FILES)
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer_export.export(scratch)
        return _read(Path(scratch), _TOKENIZER_FILES)


def _read(folder: Path, patterns: tuple[str, ...]) -> dict[str, bytes]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {path.name: path.read_bytes() for path in sorted(found)}
