"""Draft vocabularies as text and as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.report.terminal import say

if TYPE_CHECKING:
    from headstart.vocab.draft_vocab import DraftVocab
    from headstart.vocab.making import Made


def tell(
    vocabs: list[DraftVocab],
    made: list[Made],
    notes: list[str],
    out: Path | None,
    *,
    dry_run: bool,
    json_output: bool,
) -> None:
    """Print what was made or converted; `made` is empty for a file that was converted."""
    if json_output:
        done = {"out": None if out is None else str(out), "dry_run": dry_run, "notes": notes}
        say(json.dumps({"maps": [facts(vocab, made) for vocab in vocabs], **done}))
        return
    for note in notes:
        say(f"note: {note}", file=sys.stderr)
    say("\n".join(table(made) if made else [f"{v.name}: {len(v.ids)} tokens" for v in vocabs]))
    if dry_run:
        say("dry run: nothing was written", file=sys.stderr)
    else:
        say(f"wrote {out}")


def facts(vocab: DraftVocab, made: list[Made]) -> dict[str, Any]:
    """One vocabulary as JSON."""
    tried = [each for each in made if each.vocab is vocab]
    return tried[0].as_json() if tried else {"name": vocab.name, "size": len(vocab.ids)}


def table(made: list[Made]) -> list[str]:
    """One line per map and size; the one that was taken is marked."""
    lines = [f"{'map':<12}{'size':>8}  {'coverage':>9}  {'acceptance length':>18}  {'speed':>6}"]
    for each in made:
        for tried in each.candidates:
            mark = "  <- taken" if tried.size == len(each.vocab.ids) else ""
            share = "-" if tried.coverage is None else f"{tried.coverage:.2%}"
            length, speed = tried.acceptance_length, tried.predicted_speed
            shown = "-" if length is None else f"{length:.2f} at K = {tried.drafts}"
            lines.append(
                f"{each.vocab.name:<12}{tried.size:>8}  {share:>9}  {shown:>18}  "
                f"{'-' if speed is None else f'{speed:.2f}x':>6}{mark}"
            )
    return lines
