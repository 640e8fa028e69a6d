"""Headstart: a toolkit for the multi-token-prediction heads inside LLM checkpoints."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
