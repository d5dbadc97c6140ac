"""Tiny random pipelines of diffusers, made here: no file is fetched, and every number depends on its name alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from flow_models import numbers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def filled(module: torch.nn.Module, scale: float = 0.2) -> Any:
    """The module in eval mode with numbers that depend on their names; those of norms are near 1."""
    state = {}
    for name, x in module.state_dict().items():
        if not x.is_floating_point() or "pos_embed.pos_embed" in name:
            state[name] = x
        elif x.ndim == 1 and name.endswith("weight"):
            state[name] = 1 + numbers(name, *x.shape, scale=0.1)
        else:
            state[name] = numbers(name, *x.shape, scale=scale)
    module.load_state_dict(state)
    return module.eval()


def clip_tokenizer(folder: Path, length: int = 8) -> CLIPTokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    words = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: place for place, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=length)


def t5_tokenizer(folder: Path) -> T5TokenizerFast:
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    return T5TokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", pad_token="<pad>", extra_ids=0
    )


def clip_config(width: int, projection: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=54, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=8, projection_dim=projection, bos_token_id=52, eos_token_id=53, pad_token_id=53,
    )  # fmt: skip


def clip_text(width: int = 8, projection: int = 6) -> CLIPTextModelWithProjection:
    return filled(CLIPTextModelWithProjection(clip_config(width, projection)))


def clip_plain(width: int) -> CLIPTextModel:
    return filled(CLIPTextModel(clip_config(width, width)))


def t5_text(width: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=30, d_model=width, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return filled(T5EncoderModel(config))


def picture_vae(channels: int = 4) -> Any:
    from diffusers import AutoencoderKL

    return filled(
        AutoencoderKL(
            in_channels=3, out_channels=3, latent_channels=channels, block_out_channels=(8, 8), norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            layers_per_block=1, sample_size=16, scaling_factor=1.5, shift_factor=0.06,
            use_quant_conv=False, use_post_quant_conv=False,
        )
    )  # fmt: skip


def sd3(folder: Path, *, t5: bool = True) -> Any:
    """A tiny StableDiffusion3Pipeline of 16 x 16 pixels, which is saved in the folder."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=12,
        pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    made = StableDiffusion3Pipeline(
        transformer=filled(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=picture_vae(),
        text_encoder=clip_text(),
        tokenizer=clip_tokenizer(folder / "scratch"),
        text_encoder_2=clip_text(),
        tokenizer_2=clip_tokenizer(folder / "scratch"),
        text_encoder_3=t5_text(16) if t5 else None,
        tokenizer_3=t5_tokenizer(folder / "scratch") if t5 else None,
    )
    made.save_pretrained(folder / "pipeline")
    made.set_progress_bar_config(disable=True)
    return made


def flux(folder: Path, kind: str = "FluxPipeline", *, guidance_embeds: bool = True) -> Any:
    """A tiny FluxPipeline, or FluxKontextPipeline, which is saved in the folder."""
    import diffusers

    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=8, guidance_embeds=guidance_embeds, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    made = getattr(diffusers, kind)(
        transformer=filled(transformer),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=picture_vae(),
        text_encoder=clip_plain(8),
        tokenizer=clip_tokenizer(folder / "scratch"),
        text_encoder_2=t5_text(16),
        tokenizer_2=t5_tokenizer(folder / "scratch"),
    )
    made.save_pretrained(folder / "pipeline")
    made.set_progress_bar_config(disable=True)
    return made
