"""The command for our own server, shown beside those for other engines."""

from __future__ import annotations

from headstart import __version__
from headstart.checkpoint.config import text_part
from headstart.families.registry import PLAIN_TRUNKS
from headstart.heads.inspection import Report
from headstart.launch.command import EngineCommand, Process, as_word


def own_command(report: Report) -> EngineCommand | str:
    """`headstart serve` for a head that the embedded engine runs, or why there is none."""
    family = report.family
    if family is None:
        return "the embedded engine runs no model of a family that is not known here."
    inner = str(text_part(report.config).get("model_type", ""))
    known = {*family.run_types, *PLAIN_TRUNKS}
    if family.runtime is None or not known & {report.model_type, inner}:
        needs = f"; it would need {family.engine_lacks}" if family.engine_lacks else ""
        return f"the embedded engine does not run model_type {report.model_type!r}{needs}."
    if report.is_head_alone:
        return "the file holds a head alone; serve its model."
    if not report.head.is_usable:
        return f"the head is {report.head.state}; without one it serves, and drafts nothing."
    argv = ("headstart", "serve", as_word(report.path))
    return EngineCommand(engine="headstart", version=__version__, processes=(Process(argv),))
