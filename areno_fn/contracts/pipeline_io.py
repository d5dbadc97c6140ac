"""`PipelineIOContract`: what a flow model takes and makes, and what it can be trained on. Imports no weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import attrs

from areno_fn.contracts.components import Component
from areno_fn.contracts.errors import DataError, SpecError
from areno_fn.contracts.geometry import Geometry, Size
from areno_fn.contracts.identity import digest
from areno_fn.contracts.media import MEDIA_TYPES, InputMedia, MediaType, Request

Negative = Literal["refused", "optional"]
Guidance = Literal["none", "classifier_free", "embedded", "both"]
GeometrySource = Literal["configured", "input", "output", "primary_output"]
Batching = Literal["uniform", "ragged", "single_sample"]
Objective = Literal["sft", "dpo"]
Reduction = Literal["element_mean"]
Initial = Literal["noise", "input"]

RESERVED = frozenset(
    "latents next_latents state taken final states logp t t_next timestep timesteps sigma sigmas noise_level levels "
    "advantage rewards ids groups mask weight schedule process old reference average chosen rejected target".split()
)
"""Names that belong to rollouts, trainers and algorithms, and so to no condition."""


@attrs.frozen(kw_only=True)
class Output:
    """A medium that is made.

    Attributes:
        type: which.
        channels: of a picture, or of sound.
        rate: of frames or samples a second; 0 of a picture.
    """

    type: MediaType
    channels: int = 3
    rate: int = 0


def _outputs(outputs: tuple[Output, ...]) -> tuple[Output, ...]:
    return tuple(sorted(outputs, key=lambda one: MEDIA_TYPES.index(one.type)))


def _objectives(objectives: tuple[tuple[Objective, Reduction], ...]) -> tuple[tuple[Objective, Reduction], ...]:
    return tuple(sorted(set(objectives)))


def _components(components: tuple[Component, ...]) -> tuple[Component, ...]:
    return tuple(sorted(components, key=lambda one: one.name))


def _names(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))


@attrs.frozen(kw_only=True)
class PipelineIOContract:
    """What one checkpoint of a family takes and makes. Equal meaning is equal value, and equal digest.

    Attributes:
        family: its name.
        inputs: media that go in beside the prompt.
        inputs_like_output: pictures and videos that go in have the height and width of what is made.
        negative_prompt: whether a row may have one.
        guidance: "classifier_free" asks twice a step; "embedded" tells the model a scale; "both"; or "none".
        outputs: media that come out, at most one a type.
        geometry: the sizes that can be made.
        geometry_source: what says the size: the specification, the given media, or what is trained on.
        batching: whether outputs of one batch have one size, may differ, or come one by one.
        components: the parts that realise it.
        preparer: parts that the conditions are made with; nothing else is materialised for them.
        codec: parts that outputs are encoded and decoded with.
        objectives: of data sets, with how their errors are reduced over the elements of a latent.
        initial: what sampling begins with: noise, or the given medium of the kind that is made, noised.
        guidance_default: the scale that a model with embedded guidance is told where nothing is said.

    Raises:
        SpecError: it contradicts itself.
    """

    family: str
    inputs: InputMedia = attrs.field(factory=InputMedia)
    inputs_like_output: bool = False
    negative_prompt: Negative = "optional"
    guidance: Guidance = "classifier_free"
    outputs: tuple[Output, ...] = attrs.field(default=(Output(type="image"),), converter=_outputs)
    geometry: Geometry
    geometry_source: GeometrySource = "configured"
    batching: Batching = "uniform"
    components: tuple[Component, ...] = attrs.field(converter=_components)
    preparer: tuple[str, ...] = attrs.field(converter=_names)
    codec: tuple[str, ...] = attrs.field(converter=_names)
    objectives: tuple[tuple[Objective, Reduction], ...] = attrs.field(default=(), converter=_objectives)
    initial: Initial = "noise"
    guidance_default: float = 0.0

    def __attrs_post_init__(self) -> None:
        types = [one.type for one in self.outputs]
        if not types or len(set(types)) < len(types):
            raise SpecError(f"{self.family}: outputs are at least one medium, and at most one of a type")
        if self.geometry_source == "input" and not self.inputs.certain:
            raise SpecError(f"{self.family}: the size cannot come from the input where no medium needs to be given")
        certain = {rule.type for rule in self.inputs.rules if rule.certain}
        if self.initial == "input" and not set(types) <= certain:
            raise SpecError(f"{self.family}: sampling cannot begin with a medium that does not need to be given")
        declared = {one.name for one in self.components}
        for part, names in (("preparer", self.preparer), ("codec", self.codec)):
            strange = [name for name in names if name not in declared]
            if strange:
                raise SpecError(f"{self.family}: the {part} needs {strange[0]!r}, which is no declared component")
        if not any(one.trained for one in self.components):
            raise SpecError(f"{self.family}: at least one component is trained")
        if (self.guidance in ("embedded", "both")) != (self.guidance_default > 0):
            raise SpecError(f"{self.family}: a scale of guidance is given where it is embedded, and nowhere else")

    @property
    def digest(self) -> str:
        """A digest of all that it says."""
        return digest(attrs.asdict(self))

    @property
    def classifier_free(self) -> bool:
        """Whether a velocity may be led away from that of the negative prompt."""
        return self.guidance in ("classifier_free", "both")

    def admit(self, request: Request, where: str, size: Size | None = None) -> None:
        """Refuses a request before anything is drawn or encoded.

        Raises:
            DataError: names the clause that is broken; `where` the request stands, and the `size` of what is made.
        """
        problem = self.inputs.problem(request.media)
        if problem is None and request.negative_prompt and self.negative_prompt == "refused":
            problem = "negative_prompt: it takes none"
        if problem is None and self.inputs_like_output and size is not None:
            problem = _other_size(request, size)
        if problem is None and self.initial == "input" and size is not None:
            problem = _other_length(request, size)
        if problem is not None:
            raise DataError(f"{where}: {self.family} does not take this row, {problem}")

    def admit_together(self, requests: Sequence[Request], where: str) -> None:
        """Refuses requests whose conditions cannot stand in one batch, because some are given more media than others.

        Raises:
            DataError: names the clause, and two of the counts; `where` the requests stand.
        """
        counts = sorted({tuple(one.type for one in request.media) for request in requests}, key=len)
        if len(counts) > 1:
            raise DataError(
                f"{where}: {self.family} takes rows with as many media each, batching: it is {self.batching!r}, "
                f"received rows with {len(counts[0])} and with {len(counts[-1])}"
            )

    def admit_size(self, size: Size) -> None:
        """Refuses a size that cannot be made.

        Raises:
            SpecError: names the clause.
        """
        problem = self.geometry.problem(size)
        if problem is not None:
            raise SpecError(f"{self.family} does not make {size}, {problem}")

    def admit_objective(self, objective: str) -> None:
        """Refuses an objective of data sets that it does not support.

        Raises:
            SpecError: names the clause.
        """
        known = [name for name, _ in self.objectives]
        if objective not in known:
            listed = ", ".join(known) or "none"
            raise SpecError(f"{self.family} is not trained by {objective!r}, objectives: it supports {listed}")

    def admit_guidance(self, scale: float) -> None:
        """Refuses classifier-free guidance where the model has none.

        Raises:
            SpecError: names the clause.
        """
        if scale != 1 and not self.classifier_free:
            raise SpecError(
                f"{self.family} takes no classifier-free guidance, guidance: it is {self.guidance!r}; use 1, received {scale:g}"
            )

    def narrows(self, declared: PipelineIOContract) -> bool:
        """Whether all that is admitted here is admitted there: a checkpoint may only narrow what its family declares."""
        return (
            self.family == declared.family
            and self.inputs.within(declared.inputs)
            and self.inputs_like_output >= declared.inputs_like_output
            and self.negative_prompt in ("refused", declared.negative_prompt)
            and (self.guidance in ("none", declared.guidance) or declared.guidance == "both")
            and self.outputs == declared.outputs
            and self.initial == declared.initial
            and self.geometry.within(declared.geometry)
            and set(self.objectives) <= set(declared.objectives)
        )


def _other_size(request: Request, size: Size) -> str | None:
    for one in request.media:
        height, width = one.shape[-2:]
        if one.type != "audio" and (height, width) != (size.height, size.width):
            return (
                f"inputs_like_output: the {one.type} must be {size.height} x {size.width}, as what is made is, "
                f"received {height} x {width}"
            )
    return None


def _other_length(request: Request, size: Size) -> str | None:
    frames = [one.shape[0] for one in request.media if one.type == "video"]
    strange = [count for count in frames if count != size.frames]
    if not strange:
        return None
    return f"initial: the video must have {size.frames} frames, as what is made has, received {strange[0]}"


def require_condition(names: Iterable[str], where: str) -> None:
    """Refuses names of conditions that belong to something else.

    Raises:
        SpecError: names one.
    """
    taken = sorted(RESERVED & set(names))
    if taken:
        raise SpecError(f"{where}: a condition may not be called {taken[0]!r}, which is a name of rollouts or trainers")
