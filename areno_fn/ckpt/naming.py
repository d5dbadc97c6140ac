"""What the weight files of a folder are called: transformers and diffusers differ in one word."""

from __future__ import annotations

import attrs


@attrs.frozen
class Naming:
    """The names of weight files.

    Attributes:
        stem: the word that they begin with.
    """

    stem: str

    @property
    def single(self) -> str:
        """The only file of a folder that has one."""
        return f"{self.stem}.safetensors"

    @property
    def index(self) -> str:
        """The index of a folder that has several."""
        return f"{self.stem}.safetensors.index.json"

    @property
    def pattern(self) -> str:
        """What the names of several files match."""
        return f"{self.stem}-*-of-*.safetensors"

    def files(self, count: int) -> list[str]:
        """The names of `count` files."""
        if count == 1:
            return [self.single]
        return [f"{self.stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


TRANSFORMERS = Naming("model")
DIFFUSERS = Naming("diffusion_pytorch_model")
NAMINGS = (TRANSFORMERS, DIFFUSERS)
