"""The type of the `tiny` fixture, for annotations (conftest files cannot be imported by name)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Tiny = Callable[..., Path]
