"""Which model a run trains, known from configuration and headers alone: no weight is read here."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import torch

from areno_fn.ckpt import hf
from areno_fn.ckpt.naming import DIFFUSERS, TRANSFORMERS, Naming
from areno_fn.ckpt.pipeline import is_pipeline
from areno_fn.contracts.errors import CheckpointError, ModelError, SpecError
from areno_fn.contracts.flow_adapter import FlowAdapter
from areno_fn.contracts.flow_policy import FlowPolicy
from areno_fn.contracts.key import Key
from areno_fn.contracts.layout import Iso
from areno_fn.contracts.placement import Placement
from areno_fn.contracts.policy import TokenPolicy
from areno_fn.contracts.spec import HFModel, Medium, RunSpec, ScratchModel
from areno_fn.engine.pipeline_model import PipelinePlan, plan_pipeline
from areno_fn.engine.weights import Weights, all_as_loaded, load_all
from areno_fn.models import FAMILIES, Family, family_of
from areno_fn.models.flow_families import FLOW_FAMILIES, FlowFamily, flow_family_of
from areno_fn.models.flow_layouts import FLOW_LAYOUTS
from areno_fn.models.layouts import LAYOUTS
from areno_fn.models.pipelines import PipelineFamily, prefixes
from areno_fn.world.tokenizer import declared_eos

_HEAD = "lm_head.weight"
_NORM = "norm.weight"
MOST_PARAMETERS = 100_000_000_000
"""Of a model from scratch: 400 GB."""
_TRAINABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@attrs.frozen(kw_only=True)
class ModelPlan:
    """A model that can be loaded or initialised.

    Attributes:
        family: its functions: a `Family` of models of text, a `FlowFamily`, or a `PipelineFamily`.
        config: its configuration, in the family's own type; of a pipeline those of its transformers, by component.
        hf_config: the content of config.json, of the source or made up for a model from scratch; those of several
            transformers by component.
        layout: from the tensors of the file to the parameter tree.
        policy: the model's functions, configuration filled in: a `TokenPolicy` or a `FlowPolicy`.
        weights: the folders it comes from: one, or that of each transformer of a pipeline; none from scratch.
        dtype: what floating parameters become in memory.
        declared_eos: end tokens that the folder's configuration names.
        pipeline: the pipeline that its component belongs to; None of any other model.
    """

    family: Family | FlowFamily | PipelineFamily
    config: Any
    hf_config: Mapping[str, Any]
    layout: Iso
    policy: TokenPolicy | FlowPolicy
    dtype: hf.DtypePolicy
    weights: tuple[Weights, ...] = ()
    declared_eos: tuple[int, ...] = ()
    pipeline: PipelinePlan | None = None

    @property
    def folder(self) -> hf.HFFolder | None:
        """The only folder that it comes from; None from scratch, or where there are several."""
        return self.weights[0].folder if len(self.weights) == 1 else None

    @property
    def token_policy(self) -> TokenPolicy:
        """The functions of a model of text."""
        assert isinstance(self.family, Family)
        return cast(TokenPolicy, self.policy)

    @property
    def flow_policy(self) -> FlowPolicy:
        """The functions of a model of pictures."""
        assert not isinstance(self.family, Family)
        return cast(FlowPolicy, self.policy)

    @property
    def adapter(self) -> FlowAdapter:
        """The functions of a pipeline."""
        assert self.pipeline is not None
        return cast(FlowAdapter, self.policy)

    @property
    def text_family(self) -> Family:
        """The family of a model of text; algorithms of text, which ask, are refused for any other."""
        assert isinstance(self.family, Family)
        return self.family

    @property
    def medium(self) -> Medium:
        """What it makes."""
        return "text" if isinstance(self.family, Family) else "pictures"

    @property
    def naming(self) -> Naming:
        """What weight files are called of a model that comes from no folder."""
        return TRANSFORMERS if isinstance(self.family, Family) else DIFFUSERS

    @property
    def fixed(self) -> Collection[str]:
        """The leaves that nothing trains, whatever is trained: stored tables, and transformers that stay as they are."""
        if not isinstance(self.family, PipelineFamily):
            return ()
        frozen = tuple(part.prefix for part in self.weights if not part.trained)
        kept = {leaf for leaf in self.layout.target if frozen and leaf.startswith(frozen)}
        return self.family.fixed(self.config) | kept

    @property
    def adaptable(self) -> Iso:
        """The layout without transformers that stay as they are."""
        frozen = tuple(part.prefix for part in self.weights if not part.trained)
        if not frozen:
            return self.layout
        return Iso(tuple(part for part in self.layout.parts if not next(iter(part.target)).startswith(frozen)))

    @property
    def identity(self) -> Any:
        """What decides what its parameters mean."""
        return self.hf_config if self.pipeline is None else [dict(self.hf_config), self.pipeline.identity]

    @property
    def placements(self) -> Mapping[str, Placement]:
        """How ranks share each leaf, which also says what is fused in it."""
        if not isinstance(self.family, Family):
            return self.family.placements(self.config)
        return LAYOUTS[self.family.name].placements(self.config, tuple(self.layout.source))

    def shapes(self) -> Any:
        """The parameter tree as meta tensors, in the dtypes that `load` gives them."""
        shapes = self.family.shapes(self.config)
        return all_as_loaded(self.weights, shapes, self.dtype) if self.weights else shapes

    def load(self, key: Key, device: torch.device, progress: hf.Progress | None = None) -> Any:
        """The parameters: read from the folder, or drawn with `key`."""
        if not self.weights:
            assert not isinstance(self.family, PipelineFamily), "a pipeline comes from a folder"
            return self.family.init(self.config, key, device=device)
        return load_all(self.weights, self.family.shapes(self.config), self.dtype, device, progress)

    def stored(self, path: str) -> torch.dtype:
        """The dtype that a leaf has in its file; float32 from scratch."""
        part = next((part for part in self.weights if path.startswith(part.prefix)), None)
        if part is None:
            return torch.float32
        name = part.layout.sources_of(path.removeprefix(part.prefix))[0]
        return part.folder.specs[name].dtype or torch.float32


def plan_model(spec: RunSpec) -> ModelPlan:
    """Reads the configuration and checks the headers of the files against the layout.

    Raises:
        ModelError: an unsupported field. CheckpointError: the folder is damaged or incomplete.
    """
    if isinstance(spec.model, HFModel):
        return from_folder(spec.model)
    name = spec.model.family
    if name in FLOW_FAMILIES:
        return _held(flow_from_scratch(FLOW_FAMILIES[name], spec.model))
    if name in FLOW_LAYOUTS:
        raise ModelError(
            f"family: {name!r} is trained from a pipeline folder of diffusers; use kind 'hf' with its path"
        )
    if name not in FAMILIES:
        raise ModelError(
            f"family: there is no {name!r}; those of text are {', '.join(FAMILIES)}, those of pictures {', '.join(FLOW_FAMILIES)}"
        )
    return _held(from_scratch(spec.model))


def _held(made: ModelPlan) -> ModelPlan:
    """The same plan, where a machine can hold its parameters, of which nobody has looked at a file."""
    parameters = sum(math.prod(spec.shape) for spec in made.layout.target.values())
    if parameters > MOST_PARAMETERS:
        raise ModelError(
            f"config: it makes {parameters:,} parameters, and a model from scratch has at most {MOST_PARAMETERS:,}; lower the "
            f"sizes in it"
        )
    return made


def flow_from_scratch(family: FlowFamily, spec: ScratchModel) -> ModelPlan:
    """A flow model of a configuration alone.

    Raises:
        ModelError: an unsupported field.
    """
    config = family.config_from_hf({"_class_name": family.class_name, **spec.config})
    return _flow_plan(family, config, family.config_to_hf(config), None, "float32")


def from_scratch(spec: ScratchModel) -> ModelPlan:
    """A model of a configuration alone.

    Raises:
        ModelError: an unsupported field.
    """
    named = {"model_type": spec.family, **spec.config}
    family = family_of(named)
    config = family.config_from_hf(named)
    return ModelPlan(
        family=family,
        config=config,
        hf_config=family.config_to_hf(config),
        layout=family.layout(config, head_in_file=not config.tie_embeddings),
        policy=family.policy(config),
        dtype="float32",
    )


def from_folder(spec: HFModel) -> ModelPlan:
    """The model of a Hugging Face folder, whose headers have been checked against the family's layout.

    The file decides about the head: one that is not there is the embedding, whatever the configuration says, and
    the configuration that is written then says so. A head is never made up.

    Raises:
        ModelError: an unsupported field. CheckpointError: the folder is damaged or incomplete.
    """
    if is_pipeline(spec.path):
        return _from_pipeline(spec)
    if spec.pipeline is not None:
        raise SpecError(_no_pipeline(spec.path))
    folder = hf.open_folder(spec.path)
    _require_no_part(folder)
    flow = flow_family_of(folder.config)
    if flow is not None:
        return _flow_from_folder(flow, folder, spec)
    family = family_of(folder.config)
    tied = {} if _HEAD in folder else {"tie_word_embeddings": True}
    hf_config = {**folder.config, **tied}
    config = family.config_from_hf(hf_config)
    layout = family.layout(config, head_in_file=_HEAD in folder)
    hf.require_fit(folder, layout, spec.dtype)
    require_computable(folder, spec.dtype)
    return ModelPlan(
        family=family,
        config=config,
        hf_config=hf_config,
        layout=layout,
        policy=family.policy(config),
        weights=(Weights(folder=folder, layout=layout, config=hf_config),),
        dtype=spec.dtype,
        declared_eos=declared_eos(spec.path),
    )


def _no_pipeline(path: str) -> str:
    """What is wrong with the path of a model that is to be a pipeline."""
    if "\0" in path or not Path(path).is_dir():
        return (
            f"path: {path!r} is no folder here; with `pipeline` it is a pipeline folder of diffusers on this machine, with "
            f"model_index.json, so download the model first and give its folder"
        )
    parent = Path(path).absolute().parent
    if is_pipeline(parent):
        return f"path: {path} is a part of the pipeline folder {parent}; give that folder"
    return (
        f"path: {path} holds no model_index.json, so it is no pipeline folder of diffusers; give such a folder, or remove "
        f"the table `pipeline`, which is for pipelines alone"
    )


def _from_pipeline(spec: HFModel) -> ModelPlan:
    made = plan_pipeline(spec)
    kind, before = made.family.transformer, prefixes(made.transformers)
    configs, weights = {}, []
    for name in made.transformers:
        folder = hf.open_folder(made.root / name)
        configs[name] = kind.config_from_hf(folder.config)
        part = Weights(
            folder=folder,
            layout=kind.layout(configs[name]),
            config=folder.config,
            name=name,
            prefix=before[name],
            trained=name in made.trained,
            left_out=kind.left_out,
        )
        part.require_fit(spec.dtype)
        require_computable(folder, spec.dtype)
        weights.append(part)
    said = {part.name: part.config for part in weights}
    return ModelPlan(
        family=made.family,
        config=configs,
        hf_config=said if len(said) > 1 else weights[0].config,
        layout=made.family.layout(configs),
        policy=made.adapter(),
        weights=tuple(weights),
        dtype=spec.dtype,
        pipeline=made,
    )


def _require_no_part(folder: hf.HFFolder) -> None:
    """Refuses a transformer alone: what its conditions mean is in the other parts of its pipeline."""
    named = folder.config.get("_class_name")
    if named in {family.name for family in FLOW_LAYOUTS.values()}:
        raise ModelError(f"{folder.path} holds a {named} alone; give the folder of the pipeline that it belongs to")


def _flow_from_folder(family: FlowFamily, folder: hf.HFFolder, spec: HFModel) -> ModelPlan:
    config = family.config_from_hf(folder.config)
    made = _flow_plan(family, config, folder.config, folder, spec.dtype)
    hf.require_fit(folder, made.layout, spec.dtype)
    require_computable(folder, spec.dtype)
    return made


def _flow_plan(
    family: FlowFamily, config: Any, hf_config: Mapping[str, Any], folder: hf.HFFolder | None, dtype: hf.DtypePolicy
) -> ModelPlan:
    return ModelPlan(
        family=family,
        config=config,
        hf_config=hf_config,
        layout=family.layout(config),
        policy=family.policy(config),
        weights=() if folder is None else (Weights(folder=folder, layout=family.layout(config), config=hf_config),),
        dtype=dtype,
    )


def require_computable(folder: hf.HFFolder, policy: hf.DtypePolicy) -> None:
    """Norms are taken in float32 and may have a dtype of their own; whatever is multiplied must have one."""
    stored = {name: spec.dtype or torch.float32 for name, spec in folder.specs.items()}
    strange = [name for name, dtype in stored.items() if dtype not in _TRAINABLE]
    if strange:
        raise CheckpointError(
            f"{folder.path}: {strange[0]!r} is stored as {_short(stored[strange[0]])} ({len(strange)} such tensors), but only "
            f"{', '.join(map(_short, _TRAINABLE))} can be trained; convert quantised weights first"
        )
    multiplied = {name: hf.converted(dtype, policy) for name, dtype in stored.items() if not name.endswith(_NORM)}
    first = {dtype: name for name, dtype in reversed(multiplied.items())}
    if len(first) > 1:
        shown = " and ".join(f"{name!r} in {_short(dtype)}" for dtype, name in first.items())
        raise CheckpointError(
            f"{folder.path}: it holds {shown}, which cannot be multiplied with each other; load with the dtype 'float32' or "
            f"'bfloat16'"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
