"""Finds a DSpark or DFlash drafter in a checkpoint, so that it is never handled as a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import HeadNotFound
from headstart.families.drafters import Drafter, is_inside, num_stages, of_config, of_names
from headstart.families.engines import ENGINE_TITLES


@dataclass(frozen=True)
class FoundDrafter:
    """A drafter that is no head: what kind, how that is known, and its tensors as they are."""

    kind: Drafter
    evidence: str
    tensors: tuple[str, ...]  # published names; empty where the checkpoint is the drafter itself
    num_bytes: int
    num_stages: int
    flags: dict[str, str]  # engine -> what to start it with, and since which release

    @property
    def is_inside(self) -> bool:
        return bool(self.tensors)

    def serving(self) -> str:
        """Which engines serve it with what, in one sentence."""
        ways = [
            f"{ENGINE_TITLES[engine]} {self.kind.served[engine][0]} or later with {flags}"
            for engine, flags in self.flags.items()
        ]
        return f"{self.kind.name} is served by {'; by '.join(ways)}"

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind.name,
            "evidence": self.evidence,
            "tensors": len(self.tensors),
            "bytes": self.num_bytes,
            "stages": self.num_stages,
            "engines": {
                engine: {"since": self.kind.served[engine][0], "flags": flags}
                for engine, flags in self.flags.items()
            },
        }


def find_drafter(checkpoint: Checkpoint) -> FoundDrafter | None:
    """The drafter of a checkpoint that is no head, or None."""
    fields = checkpoint.config.fields
    found = of_config(checkpoint.config.raw, fields) or of_names(checkpoint.tensors)
    if found is None:
        return None
    kind, evidence = found
    names = tuple(name for name in checkpoint.tensors if is_inside(name))
    size = sum(checkpoint.info(name).num_bytes for name in names)
    apart = "" if names else str(checkpoint.folder)
    flags = {engine: kind.flags(engine, fields, apart) for engine in kind.served}
    return FoundDrafter(kind, evidence, names, size, num_stages(names), flags)


def refuse_drafter(checkpoint: Checkpoint) -> None:
    """HeadNotFound if the checkpoint has, or is, a drafter of another kind than a head."""
    found = find_drafter(checkpoint)
    if found is None:
        return
    holds = "holds" if found.is_inside else "is"
    raise HeadNotFound(
        f"{checkpoint.folder} {holds} a {found.kind.name} drafter ({found.evidence}), which is no "
        "MTP head: it cannot be exported, converted, stitched or grafted, only copied with its "
        f"model. {found.serving()}. Take a release with a head for anything else."
    )
