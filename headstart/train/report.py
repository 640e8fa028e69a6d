"""report.html of a run: curves, before and after, by depth and by category."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.report.page import Page
from headstart.train.lane import Lane

if TYPE_CHECKING:
    from headstart.train.session import Session

Points = dict[str, list[tuple[float, float]]]


def write_report(path: Path, lane: Lane, session: Session) -> None:
    """From the run's metrics and options."""
    lines = lane.folder.metrics.lines()
    options = lane.learner.options
    page = Page("Training of a head", f"{session.job.model.name}, {lane.name}")
    page.facts(
        {
            "records": len(session.records),
            "steps": session.num_steps,
            "best step": lane.progress.best_step,
            "loss": f"{options.loss}, context {options.context}, K {options.num_depths}",
            "learning rate": options.learning_rate,
        }
    )
    steps = [line for line in lines if "loss" in line]
    if steps:
        page.line_chart("Loss by depth", _by_depth(steps, "loss_by_depth"), "step", "loss")
        matches = _by_depth(steps, "cumulative_match")
        page.line_chart("Cumulative match on training text", matches, "step", "share of chains")
    found = {line["step"]: line["validation"] for line in lines if "validation" in line}
    if found:
        _validations(page, found, lane.progress.best_step)
    page.json("options", options.document())
    page.write(path)


def _validations(page: Page, found: dict[int, dict[str, Any]], best: int) -> None:
    before, after = found[0], found[best]
    page.heading("Held-out answers, walked round by round")
    page.line_chart(
        "Acceptance length",
        {"held out": [(step, part["acceptance_length"]) for step, part in found.items()]},
        "step",
        "tokens per round",
    )
    names = [f"depth {k}" for k in range(1, len(after["cumulative_acceptance"]) + 1)]
    rates = {"before": before, f"after (step {best})": after}
    page.bar_chart(
        "Cumulative acceptance by depth",
        names,
        {name: part["cumulative_acceptance"] for name, part in rates.items()},
        "share of rounds",
    )
    page.table(
        ["category", "acceptance length before", "after"],
        [["all", before["acceptance_length"], after["acceptance_length"]]]
        + [
            [name, before["by_category"][name]["acceptance_length"], part["acceptance_length"]]
            for name, part in after["by_category"].items()
        ],
    )


def _by_depth(lines: list[dict[str, Any]], name: str) -> Points:
    count = len(lines[0][name])
    return {
        f"depth {k + 1}": [(line["step"], line[name][k]) for line in lines] for k in range(count)
    }
