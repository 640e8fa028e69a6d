"""The demo's report.html."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headstart.demo.race import SIDES, Race, best_drafts, mean_speed_up
from headstart.report.page import Page

NAMES = {"plain": "without MTP", "drafted": "with MTP"}


def write_page(path: Path, races: list[Race], facts: Mapping[str, object]) -> None:
    """Everything that the terminal showed, and the numbers for machines."""
    page = Page("Headstart demo", "SmolLM2-135M-Instruct with and without its MTP head")
    page.facts(
        {
            **facts,
            "mean speed-up": f"{mean_speed_up(races):.2f}x",
            "drafts per round chosen most often": best_drafts(races),
        }
    )
    categories = [one.category for one in races]
    speeds = {NAMES[side]: [one.rates[side] for one in races] for side in SIDES}
    page.bar_chart("Speed", categories, speeds, "tokens per second")
    depths = max(len(one.acceptance.per_round) for one in races)
    by_depth = {
        one.category: [(k, rate) for k, rate in enumerate(one.acceptance.per_round, 1)]
        for one in races
    }
    if depths:
        page.line_chart("Acceptance", by_depth, "depth of the draft", "drafts accepted per round")
    page.table(
        ["question", "tokens", *NAMES.values(), "speed-up", "acceptance length", "texts"],
        [_row(one) for one in races],
        "Speeds in tokens per second, the reading of the prompt included.",
    )
    for one in races:
        page.heading(one.question)
        page.text(one.answers["drafted"].text)
    page.json("demo", {"facts": dict(facts), "races": [one.as_json() for one in races]})
    page.write(path)


def _row(one: Race) -> list[object]:
    rates = [one.rates[side] for side in SIDES]
    said = "identical" if one.divergence is None else f"differ from token {one.divergence.position}"
    tokens = len(one.answers["drafted"].token_ids)
    return [one.category, tokens, *rates, one.speed_up, one.acceptance.length, said]
