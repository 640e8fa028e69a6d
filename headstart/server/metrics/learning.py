"""The metrics of learning, from what it says of itself."""

from __future__ import annotations

from typing import Any

from headstart.server.metrics.table import OTHER

# By metric: the fact, or what of it.
_NUMBERS = {
    "learn_steps": "steps", "learn_seconds": "seconds", "learn_checks": "checks",
    "learn_swaps": "swaps", "learn_rollbacks": "rollbacks", "learn_failures": "failures",
    "learn_store_bytes": "bytes", "learn_busy_seconds": "busy_seconds",
    "learn_shared_seconds": "shared_seconds",
}  # fmt: skip
_COLLECTED = {
    "learn_collected_texts": "texts", "learn_collected_tokens": "tokens",
    "learn_lost_texts": "lost",
}  # fmt: skip
_MOST_KINDS = 8
_HEADS = ("before", "after")


def learning_values(facts: dict[str, Any]) -> dict[tuple[str, tuple[str, ...]], float]:
    """By metric and labels. Kinds are numbered, in the order in which checks met them: their names
    are words of prompts."""
    values: dict[tuple[str, tuple[str, ...]], float] = {}
    values |= {(metric, ()): float(facts[name]) for metric, name in _NUMBERS.items()}
    values |= {(metric, ()): facts["collected"][name] for metric, name in _COLLECTED.items()}
    values |= {("learn_texts", (use,)): facts[use] for use in ("train", "heldout")}
    if facts["curve"]:
        last = facts["curve"][-1]
        numbers = facts["kind_numbers"]
        kinds_by_name = {
            str(numbers[kind]): lengths
            for kind, lengths in facts["by_kind"].items()
            if numbers[kind] <= _MOST_KINDS
        }
        kinds_by_name[OTHER] = [last["recent_before"], last["recent"]]
        for kind, lengths in kinds_by_name.items():
            for head, length in zip(_HEADS, lengths, strict=True):
                values["learn_acceptance_length", (kind, head)] = length
    live = facts.get("live") or {}
    if live.get("answers"):
        values["learn_live_first_drafts", ("before",)] = live["old"]
        values["learn_live_first_drafts", ("after",)] = live["new"]
    return values
