"""What a learner says of its work: numbers that a server shows, and lines in its log."""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger("headstart.learn")
_MOST_POINTS = 200  # of the curve


def first_numbers() -> dict[str, Any]:
    """Before anything was said."""
    return {
        "steps": 0, "seconds": 0.0, "trained_tokens": 0, "checks": 0, "swaps": 0,
        "rollbacks": 0, "failures": 0, "train": 0, "heldout": 0, "bytes": 0, "useless": 0,
        "thinned": 0, "by_kind": {}, "kind_numbers": {}, "state": "starting", "reason": "",
        "loss": None, "curve": [], "base_states": {},
    }  # fmt: skip


def note(numbers: dict[str, Any], name: str, event: dict[str, Any], serving: str) -> None:
    """Change the numbers by one event; serving: the name of the head that goes on."""
    if name == "ready":
        numbers["state"] = "waiting for texts"
        _log.info("learning: the learner is ready and takes %.2f GB, later up to %.2f GB more for "
                  "states of texts", event["bytes"] / 1e9, event["to_come"] / 1e9)  # fmt: skip
    elif name == "texts":
        if event["useless"] and not numbers["useless"]:
            _log.warning(
                "learning: nothing can be learned from answers that begin behind max_len "
                "tokens (an option of --learn-options), as of %d texts",
                event["useless"],
            )
        numbers.update({key: event[key] for key in ("train", "heldout", "bytes", "useless")})
    elif name == "thinned":
        numbers["thinned"] += event["dropped"]
    elif name == "base":
        numbers["base_states"] = event
        if event["is_done"]:
            _log.info("learning: states of %d of %d texts of the base are at hand (%.0f s)",
                      event["prepared"], event["of"], event["seconds"])  # fmt: skip
    elif name == "step":
        numbers["state"] = "learning"
        numbers.update(steps=event["steps"], loss=event["loss"])
        numbers["seconds"] += event["seconds"]
        numbers["trained_tokens"] += event["tokens"]
    elif name == "checked":
        _checked(numbers, event)
    elif name in ("diverged", "failed", "crowded", "rests"):
        numbers["state"] = "resting" if name == "rests" else "learning"
        numbers["failures"] += name != "rests"
        numbers["reason"] = event["reason"]
        _log.warning("learning: %s; serving goes on with head %s", event["reason"], serving)
    elif name == "vocab":
        _log.info("learning: %s", event["reason"])
    elif name == "ended":
        _log.error("learning: the learner failed: %s", event["reason"])


def _checked(numbers: dict[str, Any], event: dict[str, Any]) -> None:
    numbers["checks"] += 1
    numbers["by_kind"] = event["by_kind"]
    known = numbers["kind_numbers"]  # a kind keeps its number: metrics have no other name for it
    numbers["kind_numbers"] = known | {
        kind: number
        for number, kind in enumerate(
            (k for k in event["by_kind"] if k not in known), len(known) + 1
        )
    }
    numbers["reason"] = event["reason"]
    point = {"seconds": numbers["seconds"], "steps": event["steps"],
             "recent_before": event["recent"]["old"], "recent": event["recent"]["new"],
             "base": event["base"]["new"]}  # fmt: skip
    numbers["curve"] = [*numbers["curve"][1 - _MOST_POINTS :], point]
    _log.info("learning: after %d steps %s", event["steps"], event["reason"])
