"""`LAYOUTS`: the layout of every token family by `model_type`, also of those whose forward is not written."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import attrs

from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.layout import Iso
from areno_fn.contracts.placement import Placement
from areno_fn.models import tiny_dense
from areno_fn.models.bailing import checkpoint as bailing
from areno_fn.models.bailing import config as bailing_config
from areno_fn.models.bailing import tiny as bailing_tiny
from areno_fn.models.gemma4 import checkpoint as gemma4
from areno_fn.models.gemma4 import config as gemma4_config
from areno_fn.models.gemma4 import tiny as gemma4_tiny
from areno_fn.models.llama import checkpoint as llama
from areno_fn.models.llama import model as llama_model
from areno_fn.models.minicpmv46 import checkpoint as minicpmv46
from areno_fn.models.minicpmv46 import config as minicpmv46_config
from areno_fn.models.minicpmv46 import tiny as minicpmv46_tiny
from areno_fn.models.qwen2 import checkpoint as qwen2
from areno_fn.models.qwen2 import model as qwen2_model
from areno_fn.models.qwen3 import checkpoint as qwen3
from areno_fn.models.qwen3 import model as qwen3_model
from areno_fn.models.qwen3_5 import checkpoint as qwen3_5
from areno_fn.models.qwen3_5 import config as qwen3_5_config
from areno_fn.models.qwen3_5 import tiny as qwen3_5_tiny
from areno_fn.models.qwen3_moe import checkpoint as qwen3_moe
from areno_fn.models.qwen3_moe import config as qwen3_moe_config
from areno_fn.models.qwen3_moe import tiny as qwen3_moe_tiny
from areno_fn.models.table import HEAD, Table
from areno_fn.models.tiny import Choose, Config

__all__ = ["FAMILY_LAYOUTS", "LAYOUTS", "TokenLayout", "layout_of"]


@attrs.frozen(kw_only=True)
class TokenLayout:
    """How the files of a family are laid out.

    Attributes:
        name: of the family.
        model_types: what its configurations call themselves; the first is the whole model, where there is one.
        config_from_hf: reads what the layout needs of a Hugging Face configuration, refusing what it cannot lay out.
        table: `(config, names=None)`: the table of a model whose file has the tensors `names`.
        left_out: patterns of the tensors that files of `config` may have and that are no part of the text model.
        variants: contents of tiny config.json files, by name.
        strangers: names of variants that transformers does not have, though it may know their `model_type`.
        random_config: makes another one of whatever a function picks of the options that it is given.
        spellings: how some files call what transformers writes, as functions of a name.
    """

    name: str
    model_types: tuple[str, ...]
    config_from_hf: Callable[[Mapping[str, Any]], Any]
    table: Callable[..., Table]
    left_out: Callable[[Any], tuple[str, ...]]
    variants: Mapping[str, Config]
    random_config: Callable[[Choose], Config]
    spellings: tuple[Callable[[str], str], ...] = ()
    strangers: tuple[str, ...] = ()

    def layout(self, config: Any, names: Collection[str] | None = None) -> Iso:
        """From the tensors of a file to the leaves of the tree.

        Args:
            config: what `config_from_hf` returned.
            names: the tensors in the file, without those that are left out; they say which of its forms it has,
                such as whether there is a head. None: the form that transformers writes.

        Raises:
            LayoutError: the file has no embedding, or two.
        """
        return self.table(config, names).layout

    def placements(
        self, config: Any, names: Collection[str] | None = None, *, whole_experts: bool = False
    ) -> dict[str, Placement]:
        """How ranks share each leaf of the layout with the same arguments.

        Args:
            config, names: as of `layout`.
            whole_experts: every rank holds some experts and those whole, instead of a part of each.
        """
        return self.table(config, names).placements(whole_experts=whole_experts)

    def kept(self, config: Any, names: Collection[str]) -> tuple[str, ...]:
        """The names in a file that are not left out."""
        patterns = self.left_out(config)
        return tuple(name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))

    def forms(self, config: Any) -> tuple[frozenset[str], ...]:
        """The sets of names that files of `config` can have, each once; the first is what transformers writes."""
        written = frozenset(self.layout(config).source)
        spelled = [written, *(frozenset(map(spelling, written)) for spelling in self.spellings)]
        packed = [frozenset(map(_packed, names)) for names in spelled]
        heads = [change(names) for names in (*spelled, *packed) for change in (_with_head, _without_head)]
        return tuple(dict.fromkeys([written, *heads]))


def _with_head(names: frozenset[str]) -> frozenset[str]:
    return names | {HEAD}


def _without_head(names: frozenset[str]) -> frozenset[str]:
    return names - {HEAD}


def _packed(name: str) -> str:
    """The tensor that holds what all experts have under this name, in files with packed experts."""
    before, found, behind = name.partition(".experts.")
    if not found or not behind.split(".")[0].isdecimal():
        return name
    return f"{before}.experts.{'down_proj' if behind.endswith('down_proj.weight') else 'gate_up_proj'}"


def _flat(name: str) -> str:
    return name.replace("model.language_model.", "model.")


def _nested(name: str) -> str:
    return _flat(name).replace("model.", "model.language_model.", 1)


def _as_llama(name: str) -> str:
    """The words of transformers' own modules, where bailing's files have theirs."""
    name = name.replace(".attention.dense.", ".self_attn.o_proj.").replace(".attention.", ".self_attn.")
    return name.replace("word_embeddings", "embed_tokens").replace(".expert_bias", ".e_score_correction_bias")


def _nothing(config: Any) -> tuple[str, ...]:
    del config
    return ()


def _always(*patterns: str) -> Callable[[Any], tuple[str, ...]]:
    def left_out(config: Any) -> tuple[str, ...]:
        del config
        return patterns

    return left_out


def _dense(name: str, model: Any, checkpoint: Any) -> TokenLayout:
    return TokenLayout(
        name=name,
        model_types=(name,),
        config_from_hf=model.config_from_hf,
        table=checkpoint.table,
        left_out=_nothing,
        variants=tiny_dense.variants(name),
        random_config=partial(tiny_dense.random_config, name),
    )


FAMILY_LAYOUTS: tuple[TokenLayout, ...] = (
    _dense("llama", llama_model, llama),
    _dense("qwen2", qwen2_model, qwen2),
    _dense("qwen3", qwen3_model, qwen3),
    TokenLayout(
        name="qwen3_moe",
        model_types=("qwen3_moe",),
        config_from_hf=qwen3_moe_config.config_from_hf,
        table=qwen3_moe.table,
        left_out=_nothing,
        variants=qwen3_moe_tiny.VARIANTS,
        random_config=qwen3_moe_tiny.random_config,
    ),
    TokenLayout(
        name="qwen3_5",
        model_types=("qwen3_5", "qwen3_5_text"),
        config_from_hf=qwen3_5_config.config_from_hf,
        table=qwen3_5.table,
        left_out=_always(*qwen3_5.LEFT_OUT),
        variants=qwen3_5_tiny.VARIANTS,
        random_config=qwen3_5_tiny.random_config,
        spellings=(_flat, _nested),
    ),
    TokenLayout(
        name="qwen3_5_moe",
        model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
        config_from_hf=qwen3_5_config.config_from_hf,
        table=qwen3_5.table,
        left_out=_always(*qwen3_5.LEFT_OUT),
        variants=qwen3_5_tiny.MOE_VARIANTS,
        random_config=qwen3_5_tiny.random_moe_config,
        spellings=(_flat, _nested),
    ),
    TokenLayout(
        name="gemma4",
        model_types=("gemma4", "gemma4_text"),
        config_from_hf=gemma4_config.config_from_hf,
        table=gemma4.table,
        left_out=gemma4.left_out,
        variants=gemma4_tiny.VARIANTS,
        random_config=gemma4_tiny.random_config,
        spellings=(_flat, _nested),
    ),
    TokenLayout(
        name="bailing",
        model_types=("bailing_hybrid", "bailing_moe_linear"),
        config_from_hf=bailing_config.config_from_hf,
        table=bailing.table,
        left_out=bailing.left_out,
        variants={**bailing_tiny.VARIANTS, **bailing_tiny.DELTA_VARIANTS},
        random_config=bailing_tiny.random_config,
        spellings=(_as_llama,),
        strangers=tuple(bailing_tiny.VARIANTS),
    ),
    TokenLayout(
        name="minicpmv46",
        model_types=("minicpmv4_6",),
        config_from_hf=minicpmv46_config.config_from_hf,
        table=minicpmv46.table,
        left_out=_always(*minicpmv46.LEFT_OUT),
        variants=minicpmv46_tiny.VARIANTS,
        random_config=minicpmv46_tiny.random_config,
        spellings=(_flat, _nested),
    ),
)
"""Each family once."""

LAYOUTS: dict[str, TokenLayout] = {kind: family for family in FAMILY_LAYOUTS for kind in family.model_types}


def layout_of(hf_config: Mapping[str, Any]) -> TokenLayout:
    """The layout that the `model_type` of a Hugging Face configuration names.

    Raises:
        ModelError: there is no `model_type`, or no such layout here.
    """
    name = hf_config.get("model_type")
    if not isinstance(name, str) or name not in LAYOUTS:
        raise ModelError(f"model_type is {name!r}, but the layouts known here are those of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]
