"""Specifications as files: `.toml`, `.yaml`, `.json` and `.msgpack` in, `RunSpec` out, and back. Imports no torch."""

from __future__ import annotations

from areno_fn.engine.specfile.commented import commented
from areno_fn.engine.specfile.files import check, first_difference, read, text, upgrade, write
from areno_fn.engine.specfile.meanings import schema
from areno_fn.engine.specfile.starters import STARTERS

__all__ = ["STARTERS", "check", "commented", "first_difference", "read", "schema", "text", "upgrade", "write"]
