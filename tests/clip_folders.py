"""Folders of tiny random CLIP models."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTextConfig,
    CLIPTokenizer,
    CLIPVisionConfig,
)

SIDE, LONGEST = 12, 32


def write_clip(folder: Path, seed: int = 0) -> Path:
    """A model of pictures of 12 x 12 and of texts in letters and digits."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: place for place, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    shared = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = CLIPTextConfig(
        vocab_size=len(words),
        max_position_embeddings=LONGEST,
        bos_token_id=len(words) - 2,
        eos_token_id=len(words) - 1,
        pad_token_id=len(words) - 1,
        **shared,
    )
    vision = CLIPVisionConfig(image_size=SIDE, patch_size=4, **shared)
    torch.manual_seed(seed)
    model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8))
    model.save_pretrained(folder)
    sides = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=sides)
    CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder
