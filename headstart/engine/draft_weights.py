"""Drafting with 8-bit weights: half the bytes per draft, and the text stays what it was.

What is emitted is the trunk's own choice, so the LM head that drafts may be rounded; a draft that
turns out differently can only be accepted or not.
"""

from __future__ import annotations

from headstart.assembly.build import Built
from headstart.engine.options import EngineOptions
from headstart.errors import ConfigError


def rounds_drafts(built: Built, options: EngineOptions, *, fused: bool) -> bool:
    """Whether an int8 copy of the LM head drafts, for as few rows as it is faster for."""
    if options.draft_weights == "int8" and not fused:
        raise ConfigError(
            "draft_weights int8 was asked for and only the kernels of the GPU path have it. Leave "
            "it out."
        )
    if built.head is None or options.draft_weights == "as-dtype" or options.weights != "as-dtype":
        return False
    if options.draft_weights == "int8":
        return True
    return fused and not options.exact and built.dtype.itemsize == 2
