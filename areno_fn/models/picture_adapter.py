"""What the adapters share of pipelines that make one picture with one network."""

from __future__ import annotations

from typing import Self

import attrs
import torch

from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.flow_adapter import Made, NoiseLevels, Parts
from areno_fn.contracts.flow_policy import straight
from areno_fn.contracts.geometry import Size
from areno_fn.contracts.media import MediaType
from areno_fn.contracts.pipeline_io import PipelineIOContract
from areno_fn.models.module_function import ModuleFunction
from areno_fn.models.picture_codec import decoded, encoded, require_pictures


@attrs.frozen(kw_only=True, eq=False)
class PictureAdapter:
    """What is the same in either form of a state; guidance is `straight` unless a family says otherwise.

    Attributes:
        contract: what the checkpoint takes and makes.
        size: of the picture.
        levels: how the pipeline samples.
        network: the transformer.
        channels: of a state.
        side: pixels along a side of one place of a state.
    """

    contract: PipelineIOContract
    size: Size
    levels: NoiseLevels
    network: ModuleFunction
    channels: int
    side: int
    guide = staticmethod(straight)

    @property
    def grid(self) -> tuple[int, int]:
        """Places of a state along the height and the width."""
        return grid_of(self.size, self.side)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """c, h, w."""
        return (self.channels, *self.grid)

    @property
    def components(self) -> tuple[tuple[MediaType, tuple[int, ...]], ...]:
        """A picture alone."""
        return (("image", self.latent_shape),)

    def computing_again(self, every: int) -> Self:
        """The same adapter, every so many-th of whose blocks keeps its input alone; 0 for none."""
        return attrs.evolve(self, network=self.network.computing_again(every))


@attrs.frozen(kw_only=True, eq=False)
class LatentPictures(PictureAdapter):
    """States are the latents [c, h, w] of an AutoencoderKL."""

    def encode_output(self, parts: Parts, made: Made) -> torch.Tensor:
        """Clean latents [B, c, h, w] of pictures.

        Raises:
            ModelError: they have another size.
        """
        require_pictures(made["image"], self.size.height, self.size.width)
        return encoded(parts["vae"], made["image"])

    def decode(self, parts: Parts, latents: torch.Tensor) -> Made:
        """Pictures of latents."""
        return {"image": decoded(parts["vae"], latents)}


@attrs.frozen(kw_only=True, eq=False)
class PackedPictures(PictureAdapter):
    """States are tokens [N, c], each of a square of latents."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """N, c."""
        down, across = self.grid
        return (down * across, self.channels)


def grid_of(size: Size, side: int) -> tuple[int, int]:
    """How many places of so many pixels a side a picture has, along the height and the width."""
    return size.height // side, size.width // side


def require_two_by_two(class_name: str, taken: int, returned: int, patch: int) -> None:
    """Refuses a transformer that is not made for latents which its pipeline packs two by two.

    Args:
        class_name: of the pipeline.
        taken, returned: channels.
        patch: latents along a side of its own patches.

    Raises:
        ModelError: names the channels and the patch.
    """
    if returned != taken or taken % 4 or patch != 1:
        raise ModelError(
            f"{class_name} packs latents two by two into {taken} channels and gets as many back, "
            f"but its transformer returns {returned} with a patch_size of {patch}"
        )
