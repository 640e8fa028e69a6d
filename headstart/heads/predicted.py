"""What `headstart score` predicted for a head, kept so that advice goes by the same numbers.

The document lies beside the model as score.json where the user put it, else in the user's cache,
under the digests of model and head: another head, or the same one tuned further, has none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstart.checkpoint.cache import cache_folder
from headstart.checkpoint.provenance import digest
from headstart.checkpoint.reader import Checkpoint
from headstart.documents import misfit, parse_json
from headstart.errors import HeadstartError
from headstart.files import read_plain, write_whole
from headstart.heads.inspection import Report

SCORE_NAME = "score.json"
_FOLDER = "scores"
_DOCUMENT = {"results": list[dict[str, Any]], "costs": str}
_RESULT = {"vocabulary": str, "best_drafts": int, "speed": list[dict[str, Any]]}
_SPEED = {"speed_up": float, "acceptance_length": float}


@dataclass(frozen=True)
class Predicted:
    """The best K of a head, and where that comes from."""

    drafts: int
    speed_up: float
    acceptance_length: float
    vocabulary: str
    costs: str

    def describe(self) -> str:
        return (
            f"{self.speed_up:.2f}x with K = {self.drafts}, acceptance length "
            f"{self.acceptance_length:.2f}, {self.vocabulary} (`headstart score`; costs: "
            f"{self.costs})"
        )


def keep_score(document: Mapping[str, Any], model: Path, head: Path | None) -> None:
    """Keep what `score` found for this model and head; OSError where that cannot be."""
    path = _kept(model, head)
    if path is None:
        raise OSError(f"{model} has no digest, which folders of safetensors have")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(document).encode())


def find_predicted(model: Path, head: Path | None = None) -> Predicted | None:
    """What was predicted for this model and head; None where nothing was, or not by us."""
    for path in ((head or model) / SCORE_NAME, _kept(model, head)):
        if path is not None and path.is_file() and (found := _read(path)) is not None:
            return found
    return None


def with_predicted(report: Report) -> Report:
    """The report with what was predicted for its head, where something was."""
    found = find_predicted(report.path) if report.format is None and report.head.tensors else None
    if found is None:
        return report
    return replace(report, facts={**report.facts, "predicted": found.describe()})


def _kept(model: Path, head: Path | None) -> Path | None:
    try:
        parts = [digest(Checkpoint.open(each)) for each in (model, head) if each is not None]
    except (HeadstartError, OSError):  # said elsewhere, by what needs the checkpoint
        return None
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return cache_folder() / _FOLDER / f"{name}.json"


def _read(path: Path) -> Predicted | None:
    try:
        document = parse_json(read_plain(path))
    except (OSError, ValueError):
        return None
    if misfit(_DOCUMENT, document) or not document["results"]:
        return None
    result = document["results"][-1]  # with the draft vocabulary, where there is one
    if misfit(_RESULT, result) or not 0 <= result["best_drafts"] < len(result["speed"]):
        return None
    best = result["speed"][result["best_drafts"]]
    if misfit(_SPEED, best):
        return None
    return Predicted(
        result["best_drafts"], best["speed_up"], best["acceptance_length"], result["vocabulary"],
        document["costs"],
    )  # fmt: skip
