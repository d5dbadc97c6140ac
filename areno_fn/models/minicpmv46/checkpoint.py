"""minicpmv46 in a file: its text part is laid out as a qwen3_5; what sees pictures is left out."""

from __future__ import annotations

from areno_fn.models.qwen3_5.checkpoint import table

__all__ = ["LEFT_OUT", "table"]

LEFT_OUT = ("model.vision_tower.*", "model.merger.*", "mtp.*")
"""The vision tower, the projector, and the head that predicts further tokens."""
