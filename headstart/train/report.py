"""report.html of a run: curves, before and after, by depth and by category; and of several runs
that were trained side by side, what sets them apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.errors import TrainError
from headstart.report.page import Page
from headstart.train.head_run import HeadRun

if TYPE_CHECKING:
    from headstart.train.session import Session

Points = dict[str, list[tuple[float, float]]]


def write_report(path: Path, run: HeadRun, session: Session) -> None:
    """From the run's metrics and options."""
    lines = run.folder.metrics.lines()
    options = run.learner.options
    page = Page("Training of a head", f"{session.job.model.name}, {run.name}")
    page.facts(
        {
            "records": len(session.records),
            "steps": session.num_steps,
            "best step": run.progress.best_step,
            "loss": f"{options.loss}, context {options.context}, K {options.num_depths}",
            "learning rate": options.learning_rate,
        }
    )
    steps = [line for line in lines if "loss" in line]
    if steps:
        page.line_chart("Loss by depth", _by_depth(steps, "loss_by_depth"), "step", "loss")
        matches = _by_depth(steps, "cumulative_match")
        page.line_chart("Cumulative match on training text", matches, "step", "share of chains")
    found = _found(lines)
    if found:
        _validations(page, found, run.progress.best_step)
    page.json("options", options.document())
    page.write(path)


def write_comparison(path: Path, runs: Sequence[HeadRun], session: Session) -> None:
    """One page on heads that were trained side by side, the best first."""
    page = Page("Heads trained side by side", session.job.model.name)
    page.facts({"records": len(session.records), "steps": session.num_steps})
    found = {run.name: _found(run.folder.metrics.lines()) for run in runs}
    if session.heldout:
        ranked = sorted(runs, key=lambda run: -(run.progress.best_length or 0.0))
        lengths = {
            run.name: [(s, part["acceptance_length"]) for s, part in found[run.name].items()]
            for run in ranked
        }
        title = "Acceptance length on held-out answers"
        page.line_chart(title, lengths, "step", "tokens per round")
        page.table(
            ["head", "acceptance length before", "after", "best step", "options of its own"],
            [
                [
                    run.name, found[run.name][0]["acceptance_length"],
                    found[run.name][run.progress.best_step]["acceptance_length"],
                    run.progress.best_step, _own_options(run, runs),
                ]
                for run in ranked
            ],
        )  # fmt: skip
    page.json("options", {run.name: run.learner.options.document() for run in runs})
    page.write(path)


def _own_options(run: HeadRun, runs: Sequence[HeadRun]) -> str:
    """Options of this head that not all others have."""
    documents = [other.learner.options.document() for other in runs]
    own = run.learner.options.document()
    names = [n for n in own if any(document[n] != own[n] for document in documents)]
    return ", ".join(f"{name} {own[name]}" for name in names)


def _found(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Validations by step."""
    return {line["step"]: line["validation"] for line in lines if "validation" in line}


def _validations(page: Page, found: dict[int, dict[str, Any]], best: int) -> None:
    if not {0, best} <= found.keys():
        raise TrainError(
            f"metrics.jsonl lacks the validation of step 0 or {best}, so there is no report. Begin "
            "anew with --overwrite, or take the file from a copy."
        )
    before, after = found[0], found[best]
    page.heading("Held-out answers, walked round by round")
    if best == 0:
        page.text("Training did not help: the result is the head as it was.")
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
    count = min(len(line[name]) for line in lines)
    return {
        f"depth {k + 1}": [(line["step"], line[name][k]) for line in lines] for k in range(count)
    }
