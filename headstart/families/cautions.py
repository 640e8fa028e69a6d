"""What goes wrong with a head in some releases of an engine, as data.

A family lists its `Caution`s; `launch` warns of those that hold for the engine's version, `doctor`
names them where drafts are refused, and the table of families has them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headstart.families.dims import Fields
from headstart.families.versions import is_at_least


@dataclass(frozen=True, kw_only=True)
class Caution:
    """One fault: in which releases of which engine, of which models, and what it does."""

    engine: str
    text: str
    since: str = ""  # the first release with it; empty: the first that serves the head
    before: str = ""  # the first release without it again; empty: none is known
    # not in every use of these releases: said where drafts are seen to be refused, not before
    is_occasional: bool = False
    # whether the config of a model is one that it concerns
    concerns: Callable[[Fields], bool] = lambda fields: True

    def holds(self, engine: str, version: str, fields: Fields) -> bool:
        """Whether this release of the engine has the fault for a model with this config."""
        return (
            engine == self.engine
            and (not self.since or is_at_least(version, self.since))
            and not (self.before and is_at_least(version, self.before))
            and self.concerns(fields)
        )

    def releases(self) -> str:
        """The releases in words, such as ` from 0.16.0 before 0.23.0`; empty for all."""
        after = f" from {self.since}" if self.since else ""
        return f"{after} before {self.before}" if self.before else after
