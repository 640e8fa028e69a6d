"""The standalone formats of heads, and how to tell which one a folder has.

A format is a module with `plan(head) -> Export` and `read(checkpoint) -> Head`, plus `recognises`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.writer import FolderPlan
from headstart.errors import ConfigError, MissingTensor, some
from headstart.heads.detection import lacking
from headstart.heads.head import Head, config_fields, head_of

FORMATS = ("xllm", "sglang", "speculators", "headstart")


@dataclass(frozen=True)
class Export:
    """What a format makes of a head."""

    plan: FolderPlan
    changes: tuple[str, ...]  # what the format could not carry as it was, in words
    details: Mapping[str, Any] = field(default_factory=dict)  # for the way back


class Format(Protocol):
    def plan(self, head: Head) -> Export: ...
    def read(self, checkpoint: Checkpoint) -> Head: ...
    def recognises(self, checkpoint: Checkpoint) -> bool: ...


def format_named(name: str) -> Format:
    if name not in FORMATS:
        raise ConfigError(f"no format is called {name!r}; expected one of {', '.join(FORMATS)}.")
    return cast(Format, import_module(f"headstart.heads.formats.{name}"))


def format_of(checkpoint: Checkpoint) -> str | None:
    """The format of a standalone head, or None for a full checkpoint."""
    return next((name for name in FORMATS if format_named(name).recognises(checkpoint)), None)


def open_head(folder: str | Path, model_type: str | None = None) -> Head:
    """A head from any of the formats, or from inside a full checkpoint."""
    checkpoint = Checkpoint.open(folder)
    name = format_of(checkpoint)
    if name is None:
        return head_of(checkpoint, model_type)
    head = format_named(name).read(checkpoint)
    lost = lacking(head.family, config_fields(head.config), max(head.num_modules, 1), head.tensors)
    if lost:
        raise MissingTensor(
            f"{checkpoint.folder} ({name}) lacks {some(lost)}; a {head.family.name} head has them. "
            "Export the head again."
        )
    return head
