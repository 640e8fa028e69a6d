"""Headstart: a toolkit for the multi-token-prediction heads inside LLM checkpoints.

The names below are the public ones; they load when first used, so that importing the package is
cheap and never imports torch by itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headstart.checkpoint.hub import named_models

if TYPE_CHECKING:
    from headstart.checkpoint.reader import Checkpoint as Checkpoint
    from headstart.engine.engine import Engine as Engine
    from headstart.errors import HeadstartError as HeadstartError
    from headstart.heads.export import plan_convert as plan_convert
    from headstart.heads.export import plan_export as plan_export
    from headstart.heads.formats import open_head as open_head
    from headstart.heads.graft import plan_graft as plan_graft
    from headstart.heads.inspection import inspect as inspect
    from headstart.heads.stitch import plan_restore as plan_restore
    from headstart.heads.stitch import plan_stitch as plan_stitch
    from headstart.sampling.params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "checkpoint.reader",
    "Engine": "engine.engine",
    "HeadstartError": "errors",
    "SamplingParams": "sampling.params",
    "inspect": "heads.inspection",
    "open_head": "heads.formats",
    "plan_convert": "heads.export",
    "plan_export": "heads.export",
    "plan_graft": "heads.graft",
    "plan_restore": "heads.stitch",
    "plan_stitch": "heads.stitch",
}
__all__ = [
    "Checkpoint",
    "Engine",
    "HeadstartError",
    "SamplingParams",
    "__version__",
    "inspect",
    "open_head",
    "plan_convert",
    "plan_export",
    "plan_graft",
    "plan_restore",
    "plan_stitch",
]

# The one model that comes with the package; nothing is imported until it is asked for.
named_models["demo"] = lambda: import_module("headstart.demo").folder()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headstart' has no attribute {name!r}")
    return getattr(import_module(f"headstart.{_HOMES[name]}"), name)
