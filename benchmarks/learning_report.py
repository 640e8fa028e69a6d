"""The pages of learning_curve.py: JSON, a page with the curve, and Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MT_BENCH = "MT-Bench"


def write(result: dict[str, Any], out: Path) -> None:
    """JSON, a page with the curve, and a Markdown page."""
    from headstart.report.page import Page

    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    kinds = list(result["before"])
    page = Page("Learning while serving", f"{result['cpu']}, {result['cores']} cores")
    page.line_chart(
        "Acceptance length at K = 3 on requests that were never served",
        {k: [(p["minutes"], p[k]) for p in result["curve"]] for k in kinds},
        "minutes of learning", "acceptance length",
    )  # fmt: skip
    rows = [
        [k, result["before"][k], result["after"][k], _gain(result, k), _range(result, k)]
        for k in kinds
    ]
    page.table(["kind", "before", "after", "gain", "90 % certain of"], rows)
    page.json("result", result)
    page.write(out.with_suffix(".html"))
    lines = [
        "# Learning while serving: the demo's model on a CPU", "",
        f"{result['cpu']}, {result['cores']} cores; {result['served']} served requests, "
        f"{result['measured']} measured ones, answers of at most {result['max_tokens']} tokens, "
        "greedy, K = 3, whole vocabulary.",
        f"Base: {result['base']['train']['records']} answers mixed in, "
        f"{result['base']['heldout']['records']} held out; states of "
        f"{result['base_states']['prepared']} computed before the first request, in "
        f"{result['base_states']['waited']:.0f} s. {result['with_states']} served texts with the "
        "states that the server had at hand.",
        f"{result['minutes']:g} minutes of learning without traffic: "
        f"{result['learner']['steps']} steps, {result['learner']['swaps']} swaps, "
        f"{result['learner']['rollbacks']} rollbacks. Texts before and after: "
        f"{result['same_texts']} of {result['measured']} identical.", "",
        f"`{result['command']}`", "",
        "## As the server counted, before and after", "",
        "| kind | answers | rounds before | before | after | gain | 90 % certain of |",
        "|---|---|---|---|---|---|---|",
        *(f"| {k} | {result['gains'][k]['answers']} | {result['gains'][k]['rounds_before']} | "
          f"{result['before'][k]:.3f} | {result['after'][k]:.3f} | {_gain(result, k)} | "
          f"{_range(result, k)} |" for k in kinds), "",
        "## Curve: the simulator on the same answers, for up to eight of the heads that served", "",
        f"| minutes | head | {' | '.join(kinds)} |", "|---" * (2 + len(kinds)) + "|",
        *(f"| {p['minutes']:.1f} | {p['head']} | " + " | ".join(f"{p[k]:.3f}" for k in kinds) + " |"
          for p in result["curve"]), "",
    ]  # fmt: skip
    out.with_suffix(".md").write_text("\n".join(lines))


def _gain(result: dict[str, Any], kind: str) -> str:
    return f"{result['after'][kind] / result['before'][kind] - 1:+.1%}"


def _range(result: dict[str, Any], kind: str) -> str:
    found = result["gains"][kind]
    return f"{found['low']:+.1%} to {found['high']:+.1%}"
