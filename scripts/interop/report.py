"""Writes the outcome of the interoperability checks as one Markdown page and one JSON document."""

from __future__ import annotations

import argparse
import json
import os
from datetime import date
from pathlib import Path
from typing import Any

import vllm_counters as workload


def page(
    vllm: dict[str, Any], engine: dict[str, Any], speculators: dict[str, Any], today: str
) -> str:
    versions = {**speculators["versions"], **vllm["versions"]}
    served = [*vllm["results"], *engine["results"]]
    failures = [f"{r['family']}: {f}" for r in served for f in r["failures"]]
    failures += [
        f"{family}: {claim}: {problem}"
        for family, found in speculators["results"].items()
        for claim, problem in found.items()
        if problem
    ]
    lines = [
        "# Interoperability with vLLM (CPU) and speculators",
        "",
        f"{today}; {', '.join(f'{name} {value}' for name, value in sorted(versions.items()))}; "
        f"{os.cpu_count()} CPU cores. Command: `scripts/interop/run`. "
        f"{'No failures.' if not failures else f'{len(failures)} failures, listed at the end.'}",
        "",
        f"vLLM: tiny checkpoints made by `write_tiny`, {workload.NUM_PROMPTS} prompts of "
        f"{workload.PROMPT_TOKENS} tokens, {workload.NUM_TOKENS} tokens each, greedy, "
        "`method: mtp`. Every row must have the tokens of the original without speculation, every "
        "round trip the original's counters, every control others. Accepted drafts and acceptance "
        "are cumulative per depth; `drafts` counts verification rounds.",
        "",
        *_served(vllm["results"]),
        "",
        *engine_section(engine["results"]),
        "",
        "## speculators",
        "",
        *_claims(speculators["results"]),
        "",
    ]
    if failures:
        lines += ["## Failures", "", *(f"- {failure}" for failure in failures), ""]
    return "\n".join(lines)


def _served(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| family | dtype | checkpoint | K | drafts | accepted | acceptance | same tokens |",
        "|---" * 8 + "|",
    ]
    for result in results:
        for row in result["rows"]:
            accepted = " / ".join(map(str, row["accepted"]))
            rates = " / ".join(f"{rate:.3f}" for rate in row["rates"])
            same = "yes" if row["same_tokens"] else "no"
            lines.append(
                f"| {result['family']} | {result['dtype']} | {row['checkpoint']} | {row['depth']} "
                f"| {row['drafts']} | {accepted} | {rates} | {same} |"
            )
    return lines


def engine_section(results: list[dict[str, Any]]) -> list[str]:
    """Our engine beside vLLM's on the same checkpoints."""
    lines = [
        "## Our engine beside vLLM's",
        "",
        "The same prompts, our engine in FP32 with `layout=vllm`: rounds, and drafts accepted at "
        "depth 1, 2, 3 (cumulative). The last column is ours with the fusion's halves swapped.",
        "",
        "| family | dtype | K | ours | vLLM | same tokens | control |",
        "|---" * 7 + "|",
    ]
    for result in results:
        for row in result["rows"]:
            ours, vllm, control = (
                " / ".join(map(str, row[name])) for name in ("ours", "vllm", "control")
            )
            same = "yes" if row["same_tokens"] else "no"
            lines.append(
                f"| {result['family']} | {result['dtype']} | {row['depth']} | {ours} | {vllm} "
                f"| {same} | {control} |"
            )
    return lines


def _claims(results: dict[str, dict[str, str]]) -> list[str]:
    claims = list(dict.fromkeys(claim for found in results.values() for claim in found))
    lines = [f"| check | {' | '.join(results)} |", "|---" * (len(results) + 1) + "|"]
    for claim in claims:
        marks = [
            "-" if claim not in found else "FAILED" if found[claim] else "ok"
            for found in results.values()
        ]
        lines.append(f"| {claim} | {' | '.join(marks)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vllm", type=Path, help="the JSON of vllm_check.py")
    parser.add_argument("engine", type=Path, help="the JSON of engine_check.py")
    parser.add_argument("speculators", type=Path, help="the JSON of speculators_check.py")
    parser.add_argument("--out", type=Path, required=True, help="the two files, without ending")
    options = parser.parse_args()
    vllm = json.loads(options.vllm.read_text())
    engine = json.loads(options.engine.read_text())
    speculators = json.loads(options.speculators.read_text())
    today = date.today().isoformat()
    document = {"date": today, "vllm": vllm, "engine": engine, "speculators": speculators}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(page(vllm, engine, speculators, today))


if __name__ == "__main__":
    main()
