"""Which model a run trains, known from configuration and headers alone: no weight is read here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs
import torch

from areno_fn import tree
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
from areno_fn.models import FAMILIES, Family, family_of
from areno_fn.models.flow_families import FLOW_FAMILIES, FlowFamily, flow_family_of
from areno_fn.models.flow_layouts import FLOW_LAYOUTS
from areno_fn.models.layouts import LAYOUTS
from areno_fn.models.pipelines import PipelineFamily
from areno_fn.world.tokenizer import declared_eos

T = TypeVar("T")

_HEAD = "lm_head.weight"
_NORM = "norm.weight"
_TRAINABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@attrs.frozen(kw_only=True)
class ModelPlan:
    """A model that can be loaded or initialised.

    Attributes:
        family: its functions: a `Family` of models of text, a `FlowFamily`, or a `PipelineFamily`.
        config: its configuration, in the family's own type.
        hf_config: the content of config.json, of the source or made up for a model from scratch.
        layout: from the tensors of the file to the parameter tree.
        policy: the model's functions, configuration filled in: a `TokenPolicy` or a `FlowPolicy`.
        folder: the Hugging Face folder it comes from; None from scratch.
        dtype: what floating parameters become in memory.
        declared_eos: end tokens that the folder's configuration names.
        pipeline: the pipeline that its component belongs to; None of any other model.
    """

    family: Family | FlowFamily | PipelineFamily
    config: Any
    hf_config: Mapping[str, Any]
    layout: Iso
    policy: TokenPolicy | FlowPolicy
    folder: hf.HFFolder | None
    dtype: hf.DtypePolicy
    declared_eos: tuple[int, ...] = ()
    pipeline: PipelinePlan | None = None

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
        """The leaves that nothing trains, whatever is trained: stored tables."""
        return self.family.fixed(self.config) if isinstance(self.family, PipelineFamily) else ()

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
        return shapes if self.folder is None else as_loaded(shapes, self.folder, self.layout, self.dtype)

    def load(self, key: Key, device: torch.device, progress: hf.Progress | None = None) -> Any:
        """The parameters: read from the folder, or drawn with `key`."""
        if self.folder is None:
            assert not isinstance(self.family, PipelineFamily), "a pipeline comes from a folder"
            return self.family.init(self.config, key, device=device)
        like = self.family.shapes(self.config)
        return hf.load(self.folder, self.layout, like=like, dtype=self.dtype, device=device, progress=progress)


def as_loaded(shapes: T, folder: hf.HFFolder, layout: Iso, policy: hf.DtypePolicy) -> T:
    """Meta tensors in the dtypes that leaves get when they are read from a folder.

    Args:
        layout: from the tensors of the folder to the leaves.
        policy: what floating tensors become.
    """

    def leaf(path: str, meta: torch.Tensor) -> torch.Tensor:
        stored = folder.specs[layout.sources_of(path)[0]].dtype or torch.float32
        return meta.to(hf.converted(stored, policy))

    found: T = tree.map_with_path(leaf, shapes)
    return found


def plan_model(spec: RunSpec) -> ModelPlan:
    """Reads the configuration and checks the headers of the files against the layout.

    Raises:
        ModelError: an unsupported field. CheckpointError: the folder is damaged or incomplete.
    """
    if isinstance(spec.model, HFModel):
        return from_folder(spec.model)
    name = spec.model.family
    if name in FLOW_FAMILIES:
        return flow_from_scratch(FLOW_FAMILIES[name], spec.model)
    if name in FLOW_LAYOUTS:
        raise ModelError(
            f"family: {name!r} is trained from a pipeline folder of diffusers; use kind 'hf' with its path"
        )
    if name not in FAMILIES:
        raise ModelError(
            f"family: there is no {name!r}; those of text are {', '.join(FAMILIES)}, those of pictures {', '.join(FLOW_FAMILIES)}"
        )
    return from_scratch(spec.model)


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
        folder=None,
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
        folder=folder,
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
    folder = hf.open_folder(made.root / made.family.trained)
    config = made.family.config_from_hf(folder.config)
    layout = made.family.layout(config)
    hf.require_fit(folder, layout, spec.dtype)
    require_computable(folder, spec.dtype)
    return ModelPlan(
        family=made.family,
        config=config,
        hf_config=folder.config,
        layout=layout,
        policy=made.adapter(),
        folder=folder,
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
        folder=folder,
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
