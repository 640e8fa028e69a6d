"""What a command is about to write: described first, then written; nothing in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.checkpoint.provenance import provenance
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.writer import Copying, FolderPlan, Report, write_folder
from headstart.errors import some


@dataclass(frozen=True)
class Operation:
    """A planned result folder."""

    name: str
    sources: tuple[Checkpoint, ...]
    plan: FolderPlan
    facts: Mapping[str, str]  # short label -> text, shown to the user in order
    changes: tuple[str, ...] = ()  # what is not carried over byte for byte
    details: Mapping[str, Any] = field(default_factory=dict)  # kept in provenance
    measured: Mapping[str, Any] = field(default_factory=dict)  # for machines, by name

    def links(self) -> dict[str, dict[str, str]]:
        """By source folder, the links that are followed and where to; refused if outside it."""
        found = {str(source.folder): source.links() for source in self.sources}
        return {
            folder: {name: target.as_posix() for name, target in links.items()}
            for folder, links in found.items()
            if links
        }

    def describe(self) -> str:
        width = max(len(label) for label in self.facts)
        lines = [f"{label:<{width}}  {text}" for label, text in self.facts.items()]
        for folder, links in self.links().items():
            shown = some((f"{name} -> {target}" for name, target in links.items()), limit=5)
            lines.append(f"links followed in {folder}: {shown}")
        return "\n".join(lines + [f"note: {change}" for change in self.changes])

    def as_json(self) -> dict[str, Any]:
        return {
            "operation": self.name,
            "bytes": self.plan.num_bytes,
            "facts": dict(self.facts),
            "changes": list(self.changes),
            "files": {
                "written": sorted([*self.plan.shards, *self.plan.documents]),
                "copied": sorted(self.plan.copies),
            },
            "links": self.links(),
            **self.measured,
        }

    def write(
        self,
        out: Path,
        *,
        overwrite: bool = False,
        copying: Copying = "copy",
        report: Report = lambda num_bytes: None,
    ) -> None:
        """Write the result to `out`, with its provenance beside it."""
        self.links()
        write_folder(
            self.plan,
            out,
            provenance=provenance(self.name, self.sources, changes=self.changes, **self.details),
            inputs=tuple(source.folder for source in self.sources),
            overwrite=overwrite,
            copying=copying,
            report=report,
        )


def megabytes(num_bytes: int) -> str:
    """A size for people."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"


def counted(count: int, noun: str) -> str:
    """`1 shard`, `3 shards`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
