"""Draft vocabularies as text and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.vocab.draft_vocab import DraftVocab
    from headstart.vocab.making import Made


def facts(vocab: DraftVocab, made: list[Made]) -> dict[str, Any]:
    """What a machine is told of one map."""
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
