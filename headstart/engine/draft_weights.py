"""Drafting with 8-bit weights: half the bytes per draft, and the text stays what it was.

What is emitted is the trunk's own choice, so the head and the LM head that draft may be rounded; a
draft that turns out differently can only be accepted or not.
"""

from __future__ import annotations

from headstart.assembly.build import Built
from headstart.engine.options import EngineOptions
from headstart.errors import ConfigError


def drafts_in_int8(built: Built, options: EngineOptions, *, fused: bool) -> bool:
    """Whether an int8 copy of the LM head drafts, for as many rows as it is faster for."""
    if options.draft_weights == "int8" and (why := _why_not(built, options, fused=fused)):
        raise ConfigError(f"draft_weights int8 was asked for and {why}. Leave it out.")
    if built.head is None or options.draft_weights == "as-dtype" or options.weights != "as-dtype":
        return False
    if options.draft_weights == "int8":
        return True
    return fused and not options.exact and built.dtype.itemsize == 2


def _why_not(built: Built, options: EngineOptions, *, fused: bool) -> str | None:
    """What would make the option mean nothing."""
    if not fused:
        return "only the kernels of the GPU path have it"
    if built.head is None:
        return "the engine runs without a head"
    if options.exact:
        return "exact runs everything as it is"
    if options.weights != "as-dtype":
        return f"all weights are {options.weights} already"
    return None
