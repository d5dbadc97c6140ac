"""CLIP models as judges of pictures (arXiv 2103.00020), those trained on preferences, such as PickScore (2305.01569), too."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import torch

from areno_fn.contracts.errors import RewardError
from areno_fn.world.pictures import Picture, as_image

Pictures = Sequence[np.ndarray[Any, Any]]


@attrs.frozen(kw_only=True, eq=False)
class Clip:
    """A CLIP model of a run; all rewards that name its folder share it. It is read when it is first asked.

    Attributes:
        path: its Hugging Face folder.
        device: where it lives.

    Raises:
        RewardError: the folder is not one of a CLIP model, or transformers is not installed.
    """

    path: str
    device: torch.device
    _made: list[tuple[Any, Any]] = attrs.field(factory=list, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        config = Path(self.path) / "config.json"
        try:
            kind = msgspec.json.decode(config.read_bytes()).get("model_type")
        except (OSError, ValueError, AttributeError) as error:
            raise RewardError(
                f"{config} cannot be read ({' '.join(str(error).split())}); give the folder of a CLIP model"
            ) from None
        if kind != "clip":
            raise RewardError(f"{config}: the model is of type {kind!r}, but pictures are judged by one of type 'clip'")
        if importlib.util.find_spec("transformers") is None:
            raise RewardError(
                "a reward of kind 'clip' needs transformers, which is not installed; run pip install transformers"
            )

    def embedded(self, texts: Sequence[str], pictures: Pictures) -> tuple[torch.Tensor, torch.Tensor, float]:
        """What the model makes of texts and of pictures, vectors of length 1 float32 [B, D], and its temperature."""
        model, processor = self._model()
        given = processor(
            text=list(texts),
            images=[_rgb(picture) for picture in pictures],
            return_tensors="pt",
            padding=True,
            truncation=True,
            max_length=model.config.text_config.max_position_embeddings,
        ).to(self.device)
        with torch.no_grad():
            found = model(**given)
        return found.text_embeds.float(), found.image_embeds.float(), float(model.logit_scale.detach().exp())

    def _model(self) -> tuple[Any, Any]:
        if not self._made:
            from transformers import CLIPModel, CLIPProcessor  # seconds of imports, for those who want it
            from transformers.utils import logging

            shown = logging.is_progress_bar_enabled()
            logging.disable_progress_bar()  # a run has a display of its own
            try:
                model = CLIPModel.from_pretrained(self.path, local_files_only=True, use_safetensors=True)
                processor = CLIPProcessor.from_pretrained(self.path, local_files_only=True)
            except (OSError, ValueError, RuntimeError) as error:
                reason = " ".join(str(error).split())
                raise RewardError(f"{self.path}: transformers cannot read this CLIP model ({reason})") from error
            finally:
                if shown:
                    logging.enable_progress_bar()
            self._made.append((model.eval().to(self.device), processor))
        return self._made[0]


@attrs.frozen(kw_only=True, eq=False)
class ClipScore:
    """A reward: the cosine of a text and a picture.

    Attributes:
        clip: the model.
        prompt: the text, with fields of the row in braces.
        scaled: times the temperature.
        batch: most pictures at once.
    """

    clip: Clip
    prompt: str = "{prompt}"
    scaled: bool = False
    batch: int = 16

    def __call__(self, rows: Sequence[Mapping[str, Any]], pictures: Pictures) -> list[float]:
        """A number for each picture, float32 [C, S, S] from 0 to 1."""
        texts = [self._text(row) for row in rows]
        found: list[float] = []
        for start in range(0, len(texts), self.batch):
            part = slice(start, start + self.batch)
            said, seen, scale = self.clip.embedded(texts[part], pictures[part])
            cosines: list[float] = (said * seen).sum(-1).tolist()
            found += [scale * cosine for cosine in cosines] if self.scaled else cosines
        return found

    def _text(self, row: Mapping[str, Any]) -> str:
        try:
            return self.prompt.format_map(row)
        except (KeyError, IndexError, ValueError) as error:
            raise RewardError(
                f"the text {self.prompt!r} of a reward of kind 'clip' cannot be made of a row with {', '.join(sorted(row))} "
                f"({type(error).__name__}: {error}); name its fields in braces"
            ) from None


def _rgb(picture: Picture) -> Any:
    return as_image(picture).convert("RGB")
