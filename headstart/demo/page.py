"""The demo's report.html."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.data.detokenizer import Decoder, Detokenizer
from headstart.demo.race import SIDES, Race, best_drafts, mean_speed_up
from headstart.report.page import Page
from headstart.sampling.acceptance import Acceptance

if TYPE_CHECKING:
    from headstart.engine.output import Completion

FEWEST_ROUNDS = 5  # that drafted so deep, for a rate
NAMES = {"plain": "without MTP", "drafted": "with MTP"}


def write_page(
    path: Path, races: list[Race], facts: Mapping[str, object], tokenizer: Decoder | None = None
) -> None:
    """Everything that the terminal showed, and the numbers for machines."""
    page = Page("Headstart demo", "SmolLM2-135M-Instruct with and without its MTP head")
    same = sum(one.divergence is None for one in races)
    page.figures(
        {
            "mean speed-up": f"{mean_speed_up(races):.2f}x",
            "texts the same": f"{same} of {len(races)}",
            "tokens per round": f"{_mean_length(races):.2f}",
            "drafts per round, most often": str(best_drafts(races)),
        }
    )
    page.text(
        "A small extra layer guesses the next tokens, the model checks them in one pass and keeps "
        "those that it would have written itself. So the text is the model's own, and comes sooner."
    )
    categories = [one.category for one in races]
    speeds = {NAMES[side]: [one.rates[side] for one in races] for side in SIDES}
    page.bar_chart("Speed", categories, speeds, "tokens per second")
    curves = {one.category: known_depths(one.acceptance) for one in races}
    if any(curves.values()):
        page.line_chart(
            "Acceptance", {name: curve for name, curve in curves.items() if curve},
            "depth of the draft", "accepted of those drafted",
        )  # fmt: skip
        page.table(
            ["question", "rounds", "rounds that drafted so deep", "of them accepted"],
            [_depths(one) for one in races],
            f"By depth from 1. Depths that fewer than {FEWEST_ROUNDS} rounds tried have no rate.",
        )
    page.table(
        ["question", "tokens", *NAMES.values(), "speed-up", "acceptance length", "texts"],
        [_row(one) for one in races],
        "Speeds in tokens per second, the reading of the prompt included.",
    )
    page.heading("Answers, by where their tokens came from")
    page.tinted(
        [("accepted", "accepted"), (" guessed right  ", ""), ("recovered", "recovered"),
         (" put right by the model  ", ""), ("bonus", "bonus"), (" the model's own", "")]
    )  # fmt: skip
    for one in races:
        page.heading(one.question)
        page.tinted(pieces_of(one.answers["drafted"], tokenizer))
    page.heading("Where it ran")
    page.facts(facts)
    page.json("demo", {"facts": dict(facts), "races": [one.as_json() for one in races]})
    page.write(path)


def pieces_of(answer: Completion, tokenizer: Decoder | None) -> list[tuple[str, str]]:
    """The answer's text, token by token with its origin; in one piece without a tokenizer."""
    if tokenizer is None:
        return [(answer.text, "")]
    text = Detokenizer(tokenizer, (), skip_special=True, keep_stop=True)
    pieces: list[tuple[str, str]] = []
    for token, origin in zip(answer.token_ids, answer.origins, strict=True):
        before = len(text.text)
        text.add(token)  # half a character waits for its other half
        if len(text.text) > before:
            pieces.append((text.text[before:], origin))
    return pieces


def _mean_length(races: list[Race]) -> float:
    rounds = sum(one.acceptance.rounds for one in races)
    return sum(one.acceptance.length * one.acceptance.rounds for one in races) / max(rounds, 1)


def known_depths(found: Acceptance) -> list[tuple[int, float]]:
    """Depths that were tried often enough, with their cumulative acceptance there.

    Of rounds that drafted less a deep draft cannot be accepted: they would make a depth that was
    rarely tried look like a failure.
    """
    rates = zip(found.drafted, found.cumulative, strict=True)
    return [(k, rate) for k, (tried, rate) in enumerate(rates, 1) if tried >= FEWEST_ROUNDS]


def by_depth(found: Acceptance) -> list[str]:
    """The same for a line of text, without the depths at the end that are not known."""
    known = dict(known_depths(found))
    return [f"{known[k]:.2f}" if k in known else "-" for k in range(1, max(known, default=0) + 1)]


def _depths(one: Race) -> list[object]:
    drafted = " / ".join(map(str, one.acceptance.drafted))
    return [one.category, one.acceptance.rounds, drafted, " / ".join(by_depth(one.acceptance))]


def _row(one: Race) -> list[object]:
    rates = [one.rates[side] for side in SIDES]
    said = "identical" if one.divergence is None else f"differ from token {one.divergence.position}"
    tokens = len(one.answers["drafted"].token_ids)
    return [one.category, tokens, *rates, one.speed_up, one.acceptance.length, said]
