"""Pictures to latents and back, by the AutoencoderKL of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from areno_fn.contracts.errors import ModelError
from areno_fn.models.fields import Fields


def compression(config: Mapping[str, Any]) -> int:
    """How many pixels along a side become one latent, as the autoencoder's configuration says."""
    blocks = Fields(config, "the vae's configuration").integers("block_out_channels", default=(64,), least=1)
    return int(2 ** (len(blocks) - 1))


def require_scales(config: Mapping[str, Any], where: str) -> None:
    """Refuses an autoencoder whose latents cannot be scaled as its configuration says.

    Raises:
        ModelError: names the field.
    """
    fields = Fields(config, where)
    if "scaling_factor" in config:
        fields.number("scaling_factor", above=0)
    fields.number("shift_factor", default=None)
    for name in ("latents_mean", "latents_std"):
        value = config.get(name)
        usable = value is None or (isinstance(value, list | tuple) and all(type(x) in (int, float) for x in value))
        if not usable or (name == "latents_std" and not all(x > 0 for x in value or ())):
            kind = "numbers" if name == "latents_mean" else "numbers above 0"
            raise fields.error(f"{name} must be a list of {kind}, received {value!r:.80}")


def encoded(vae: Any, pictures: torch.Tensor) -> torch.Tensor:
    """The most likely latents [B, c, h, w] of pictures [B, 3, H, W] from 0 to 1."""
    found = vae.encode((2 * pictures - 1).to(device=vae.device, dtype=vae.dtype)).latent_dist.mode()
    return (found - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


def decoded(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """The pictures of latents, float32, cut to the range from 0 to 1."""
    found = latents.to(device=vae.device, dtype=vae.dtype) / vae.config.scaling_factor + (
        vae.config.shift_factor or 0.0
    )
    return (vae.decode(found, return_dict=False)[0].float() / 2 + 0.5).clamp(0, 1)


def require_pictures(pictures: torch.Tensor, height: int, width: int) -> None:
    """Refuses pictures of another size than the adapter's.

    Raises:
        ModelError: names both shapes.
    """
    if pictures.ndim != 4 or tuple(pictures.shape[1:]) != (3, height, width):
        raise ModelError(f"the pictures must be [B, 3, {height}, {width}], received {list(pictures.shape)}")
