"""The human view of `headstart score`."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from headstart.cli.look import console_of, table_of
from headstart.heads.operation import counted
from headstart.report.terminal import Console

_RULE_NAMES = {
    "rejection": "rejection rule",
    "greedy_drafts": "greedy drafts",
    "shared_noise": "match rule",
}


def show(document: dict[str, Any]) -> None:
    """Print what was done, then one set of tables for each draft vocabulary."""
    console = console_of()
    console.print(escape(document["explanation"]), soft_wrap=True)
    if "context" in document:
        _copies_alone(console, document)
        return
    for result in document["results"]:
        overall = result["overall"]
        line = f"{counted(overall['answers'], 'answer')} to {counted(overall['prompts'], 'prompt')}"
        if "coverage" in result:
            line += f", {100 * result['coverage']:.1f} % of their tokens can be drafted"
        if result.get("own"):
            line += f" with {result['own']} of their own"
        console.print(f"\n[bold]{escape(result['vocabulary'])}[/]: {line}", soft_wrap=True)
        if "walked" in overall:
            _replayed(console, result)
        else:
            _by_formula(console, result, document["formula"])
        _categories(console, result, document.get("formula"))
        fastest = result["speed"][result["best_drafts"]]
        console.print(
            f"best K: [bold]{fastest['drafts']}[/], {_speed_up(fastest)} times as fast as "
            f"without drafts{_about_auto(result)}",
            soft_wrap=True,
        )
    console.print(f"costs: {escape(document['costs'])}", soft_wrap=True)
    console.print(f"acceptance: {escape(document['scored_by'])}", soft_wrap=True)
    console.print(f"copies from the context: {escape(document['copies'])}", soft_wrap=True)


def _copies_alone(console: Console, document: dict[str, Any]) -> None:
    """Of a model without a head."""
    overall, parts = document["context"]["overall"], document["context"]["by_category"]
    lengths = overall["context_acceptance_length"]
    table = table_of(["answers", "number", f"acceptance length, up to {len(lengths) - 1} drafts",
                      "speed-up", "tokens copied"])  # fmt: skip
    for name, part in {"all": overall, **parts}.items():
        speed, share = part["context_speed_up"], part["context_copied_share"]
        table.add_row(
            escape(name), str(part["answers"]), f"{part['context_acceptance_length'][-1]:.3f}",
            "" if speed is None else f"{speed:.2f}", "" if share is None else f"{share:.0%}",
        )  # fmt: skip
    console.print(table)
    console.print(f"costs: {escape(document['costs'])}", soft_wrap=True)


def _about_auto(result: dict[str, Any]) -> str:
    found = result.get("auto_speed_up")
    if found is None:
        return ""
    if "context_speed_up" not in result:
        return f"; auto: {found:.2f}"
    return (
        f"; auto: {found:.2f} ({result['auto_copied_share']:.0%} of its tokens copied), the head "
        f"alone {result['head_speed_up']:.2f}, copies alone {result['context_speed_up']:.2f}"
    )


def _replayed(console: Console, result: dict[str, Any]) -> None:
    walked, rows = result["overall"]["walked"], result["overall"]["row_average"]
    table = table_of(["K", "acceptance length, walked", "row average", "predicted speed-up"])
    for speed in result["speed"]:
        k = speed["drafts"]
        table.add_row(
            str(k), _number(walked["acceptance_length"], walked["acceptance_length_interval"], k),
            f"{rows['acceptance_length'][k]:.3f}", _speed_up(speed),
        )  # fmt: skip
    console.print(table)
    table = table_of(
        ["depth", "cumulative acceptance, walked", "conditional", "row average (cumul.)"]
    )
    rates, spread = walked["cumulative_acceptance"], walked["cumulative_acceptance_interval"]
    for depth, conditional in enumerate(walked["conditional_acceptance"]):
        table.add_row(
            str(depth + 1), _number(rates, spread, depth), f"{conditional:.3f}",
            f"{rows['cumulative_acceptance'][depth]:.3f}",
        )  # fmt: skip
    console.print(table)


def _by_formula(console: Console, result: dict[str, Any], own: str) -> None:
    formulas = {n: each["row_average"] for n, each in result["overall"]["formula"].items()}
    names = [f"{_RULE_NAMES[name]}{' *' if name == own else ''}" for name in formulas]
    table = table_of(["K", *(f"length, {name}" for name in names), "predicted speed-up *"])
    for speed in result["speed"]:
        k = speed["drafts"]
        lengths = [
            _number(each["acceptance_length"], each["acceptance_length_interval"], k)
            for each in formulas.values()
        ]
        table.add_row(str(k), *lengths, _speed_up(speed))
    console.print("row averages, by formula", style="dim")
    console.print(table)
    table = table_of(["depth", *(f"conditional, {name}" for name in names)])
    for depth in range(len(formulas[own]["conditional_acceptance"])):
        rates = [f"{each['conditional_acceptance'][depth]:.3f}" for each in formulas.values()]
        table.add_row(str(depth + 1), *rates)
    console.print(table)


def _categories(console: Console, result: dict[str, Any], formula: str | None) -> None:
    if not result["by_category"]:
        return
    best = result["best_drafts"] or 1
    table = table_of(
        [
            "category", "answers", f"acceptance length at K = {best}", "cumulative by depth",
            "speed-up", "best K, speed-up", "auto",
        ]
    )  # fmt: skip
    for name, part in result["by_category"].items():
        found = part["walked"] if formula is None else part["formula"][formula]["row_average"]
        rates = " ".join(f"{rate:.2f}" for rate in found["cumulative_acceptance"][:4])
        length = _number(found["acceptance_length"], found["acceptance_length_interval"], best)
        own = part["speed"][part["best_drafts"]]
        auto = part.get("auto_speed_up")
        table.add_row(
            escape(name), str(part["answers"]), length, rates,
            f"{part['speed'][best]['speed_up']:.2f}", f"{own['drafts']}, {own['speed_up']:.2f}",
            "" if auto is None else f"{auto:.2f}",
        )  # fmt: skip
    console.print(table)


def _speed_up(speed: dict[str, Any]) -> str:
    if not speed["drafts"] or speed["speed_up_interval"] is None:
        return f"{speed['speed_up']:.2f}"
    low, high = speed["speed_up_interval"]
    return f"{speed['speed_up']:.2f} ({low:.2f} to {high:.2f})"


def _number(values: list[float], intervals: list[tuple[float, float]] | None, at: int) -> str:
    if intervals is None:
        return f"{values[at]:.3f}"
    low, high = intervals[at]
    return f"{values[at]:.3f} ({low:.3f} to {high:.3f})"
