"""The pipeline whose transformer a run trains: its contract, its functions, and where its frozen parts are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import attrs
import msgspec
import torch

from areno_fn.ckpt.content import content_of_part
from areno_fn.ckpt.pipeline import INDEX, open_pipeline
from areno_fn.contracts.components import Components, Located
from areno_fn.contracts.errors import CheckpointError, SpecError
from areno_fn.contracts.flow_adapter import FlowAdapter, Pipeline, Setting, StreamGuidance
from areno_fn.contracts.geometry import Size
from areno_fn.contracts.identity import digest
from areno_fn.contracts.pipeline_io import PipelineIOContract
from areno_fn.contracts.spec import HFModel, PipelineSpec, StreamsSpec
from areno_fn.engine.parts import FrozenParts
from areno_fn.engine.place import at
from areno_fn.models.picture_codec import require_scales
from areno_fn.models.pipelines import PipelineFamily, pipeline_family

_LATER = ("guidance_2", "trained", "streams")
"""Settings that older runs do not know, and that are nothing of a run where they are at their default."""


@attrs.frozen(kw_only=True)
class PipelinePlan:
    """A pipeline whose contract is known, and of which no weight has been read.

    Attributes:
        root: its folder.
        family: of it.
        pipeline: what the folder says.
        contract: what it takes and makes.
        setting: what a specification says of it.
        components: its parts.
        transformers: the components that are its parameters, and `trained`, those of them that a run trains.
        dtype: of the frozen ones in memory; None: each file's own.
    """

    root: Path
    family: PipelineFamily
    pipeline: Pipeline
    contract: PipelineIOContract
    setting: Setting
    components: Components
    transformers: tuple[str, ...]
    trained: tuple[str, ...]
    dtype: torch.dtype | None

    @property
    def identity(self) -> str:
        """A digest of what decides what its functions compute: the contract, the setting, every configuration, and every
        byte of the frozen parts that are used.
        """
        configs = {name: dict(config) for name, config in self.pipeline.configs.items()}
        unsaid = attrs.asdict(Setting(size=self.setting.size))
        setting = {
            name: value
            for name, value in attrs.asdict(self.setting).items()
            if name not in _LATER or value != unsaid[name]
        }
        held = {part.name: content_of_part(self.root / part.folder) for part in self._used()}
        return digest([self.contract.digest, setting, configs, str(self.dtype), held])

    def describe(self) -> str:
        """What is made, and which frozen parts will be loaded for it, in words."""
        made = " and ".join(output.type for output in self.contract.outputs)
        prepares, codes = (
            ", ".join(part.name for part in self.components.located(names))
            for names in (self.contract.preparer, self.contract.codec)
        )
        return f"makes {made} of {self.setting.size}; prompts need {prepares}; what is made needs {codes}"

    @property
    def folders(self) -> Mapping[str, Path]:
        """Where every part lies that is there, whether it is used or not."""
        there = [name for name, entry in self.pipeline.index.items() if entry is not None]
        return {name: self.root / self.components.overrides.get(name, name) for name in there}

    def adapter(self) -> FlowAdapter:
        """Its functions.

        Raises:
            ModelError: a configuration that is not supported, or diffusers is missing.
        """
        return self.family.adapter(self.pipeline, self.setting)

    def require_parts(self) -> None:
        """Refuses frozen parts that a run could not load; their weights are not read.

        Raises:
            ModelError, CheckpointError: the first one that could not be.
        """
        from areno_fn.world.parts import try_part  # transformers takes seconds to import

        for part in self._used():
            try_part(part, str(self.root))

    def _used(self) -> tuple[Located, ...]:
        """The frozen parts that prompts and what is made need."""
        return self.components.located((*self.contract.preparer, *self.contract.codec))

    def parts(self, device: torch.device) -> FrozenParts:
        """Its frozen parts, which are loaded when they are needed."""
        from areno_fn.world.parts import load_part

        return FrozenParts(self.components, partial(load_part, root=str(self.root), dtype=self.dtype, device=device))


def plan_pipeline(spec: HFModel) -> PipelinePlan:
    """Reads what a pipeline folder says of itself, and admits what is to be made of it.

    Raises:
        CheckpointError: the folder is damaged or incomplete. ModelError: a pipeline or a configuration that is not supported.
        SpecError: a size that cannot be made, or a setting that its contract does not admit.
    """
    said = spec.pipeline or PipelineSpec()
    elsewhere = {name: os.path.abspath(path) for name, path in said.parts.items()}
    pipeline = open_pipeline(spec.path, elsewhere)
    family = pipeline_family(pipeline.class_name)
    contract = family.contract(pipeline)
    for name in contract.codec:
        require_scales(pipeline.configs.get(name, {}), f"the {name}'s configuration")
    transformers = tuple(part.name for part in contract.components if part.trained)
    for name in transformers:
        _require_class(pipeline, name, spec.path)
    with at("pipeline"):
        trained = _trained(said, transformers, contract)
        setting = _setting(said, trained if trained != transformers else (), contract)
        components = Components(declared=contract.components, index=pipeline.index, overrides=elsewhere)
        _require_owners(components, spec.path)
    return PipelinePlan(
        root=Path(spec.path),
        family=family,
        pipeline=pipeline,
        contract=contract,
        setting=setting,
        components=components,
        transformers=transformers,
        trained=trained,
        dtype=None if said.dtype == "source" else getattr(torch, said.dtype),
    )


def _require_class(pipeline: Pipeline, name: str, folder: str) -> None:
    """What is exported is read by the class that model_index.json names."""
    entry, said = pipeline.index[name], pipeline.configs[name].get("_class_name")
    assert entry is not None, "what is trained is there"
    if said is not None and entry[1] != said:
        raise CheckpointError(
            f"{folder}/{INDEX} names {entry[1]} as the {name}, but its config.json {said!r}; write the one that it is in both"
        )


def _require_owners(components: Components, root: str) -> None:
    """Two components that lead to one folder, however it is written, would each load it."""
    owner: dict[str, str] = {}
    for name in components.owners:
        folder = os.path.realpath(os.path.join(root, components.overrides.get(name, name)))
        if owner.setdefault(folder, name) != name:
            raise SpecError(f"{owner[folder]} and {name} would both own {folder}; every physical part has one owner")


def _trained(spec: PipelineSpec, transformers: tuple[str, ...], contract: PipelineIOContract) -> tuple[str, ...]:
    """The transformers that are trained, in the order in which the family declares them."""
    strange = [name for name in spec.trained if name not in transformers]
    if strange:
        raise SpecError(
            f"trained: {strange[0]!r} is no transformer of this {contract.family}; choose among {' and '.join(transformers)}"
        )
    if spec.guidance_2 and len(transformers) < 2:
        raise SpecError(f"guidance_2: this {contract.family} has one transformer; use the guidance of the denoising")
    if 0 < spec.guidance_2 < 1:
        raise SpecError(
            f"guidance_2: it must be at least 1, or 0 for that of the denoising, received {spec.guidance_2:g}"
        )
    return tuple(name for name in transformers if name in spec.trained or not spec.trained)


def _setting(spec: PipelineSpec, trained: tuple[str, ...], contract: PipelineIOContract) -> Setting:
    usual = contract.geometry.default
    size = Size(height=spec.height or usual.height, width=spec.width or usual.width, frames=spec.frames or usual.frames)
    contract.admit_size(size)
    if contract.geometry_source != "configured" or contract.batching != "uniform":
        raise SpecError(
            f"{contract.family} makes outputs of several sizes, geometry_source: it is {contract.geometry_source!r}, batching: "
            f"it is {contract.batching!r}, but all that a run makes has one size; this checkpoint cannot be trained here"
        )
    if spec.guidance and not contract.guidance_default:
        raise SpecError(
            f"guidance: {contract.family} is told no scale, its guidance is {contract.guidance!r}; use that of the denoising"
        )
    several = len(contract.outputs) > 1
    if spec.streams is not None and not several:
        raise SpecError(f"streams: {contract.family} makes one medium, and no video with sound; remove this")
    if spec.streams is not None and spec.streams.blocks and not spec.streams.perturbed:
        raise SpecError(
            "streams.blocks: with perturbed = 0 no attention is perturbed; raise that, or remove the blocks"
        )
    said = msgspec.structs.asdict(spec.streams or StreamsSpec())
    streams = StreamGuidance(**said | {"blocks": tuple(said["blocks"])}) if several else None
    return Setting(
        size=size,
        guidance=spec.guidance or contract.guidance_default,
        compiled=spec.compile,
        guidance_2=spec.guidance_2,
        trained=trained,
        streams=streams,
    )
