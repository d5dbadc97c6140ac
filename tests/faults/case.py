"""What a planted mistake is tried on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Case = tuple[Callable[[Any], None], Any, Callable[[str | None], Any], tuple[str, ...]]
"""A law, the library's part, a second implementation that can be built with a mistake, and the mistakes."""
