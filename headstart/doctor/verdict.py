"""The verdict on drafts: dead, low, below what was promised, healthy, or nothing to go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headstart.doctor.evidence import Evidence
from headstart.documents import parse_json
from headstart.errors import DataError
from headstart.files import read_plain, why_unreadable
from headstart.heads.predicted import SCORE_NAME

Verdict = Literal["healthy", "below", "low", "dead", "few", "off", "unknown"]
DEAD = 0.05  # acceptance at depth 1 that no head in use has
LOW = 0.2  # and that no published head falls short of; stock heads have 0.5 and more
FEWEST_ROUNDS = 60  # with none accepted of so many, 95 % sure of less than DEAD
_SLACK = 0.05  # of a promise: rounds of one answer are not independent, texts differ


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What `headstart score` predicted for a head."""

    source: str
    rate: float  # acceptance at depth 1
    low: float  # the lower end of its interval, or the rate itself
    lengths: tuple[float, ...]  # acceptance length by K, from 0

    def as_json(self) -> dict[str, Any]:
        return {"source": self.source, "depth_1": self.rate, "low": self.low}


@dataclass(frozen=True)
class Finding:
    """One verdict, and why."""

    verdict: Verdict
    said: str

    @property
    def is_bad(self) -> bool:
        return self.verdict in ("below", "low", "dead", "off")


def judge(evidence: Evidence, promise: Promise | None, num_drafts: int | None) -> Finding:
    """What the counted drafts say."""
    shown = _shown(evidence)
    if evidence.rounds < FEWEST_ROUNDS:
        return Finding(
            "few",
            f"{shown}; {FEWEST_ROUNDS} rounds are needed to tell. Ask again when the server has "
            "answered more, or let --ask send requests.",
        )
    if evidence.high < DEAD:
        return Finding("dead", f"{shown}; a head that is read and run as it was trained has more.")
    if promise is not None and (said := _below(evidence, promise, num_drafts)):
        return Finding("below", f"{shown}; {said}")
    if any(evidence.low < limit <= evidence.high for limit in (DEAD, LOW)):
        k = "" if num_drafts else "give --speculate K, the drafts of a round, or "
        return Finding(
            "unknown",
            f"{shown}: too wide to judge by {percent(DEAD)} and {percent(LOW)}; {k}let --ask 20 "
            "send requests, whose answers may count by depth.",
        )
    if evidence.high < LOW:
        return Finding("low", f"{shown}; published heads have more than {percent(LOW)}.")
    kept = f", and {percent(promise.rate)} were promised ({promise.source})" if promise else ""
    return Finding("healthy", f"{shown}{kept}.")


def _below(evidence: Evidence, promise: Promise, num_drafts: int | None) -> str | None:
    """How far a promise was missed, None if it was kept or cannot be compared."""
    most = evidence.high if evidence.interval is None else evidence.interval[1]
    if most < promise.low - _SLACK:
        return f"promised were {percent(promise.rate)} ({promise.source})."
    if evidence.is_exact:
        return None
    if evidence.per_round is None or num_drafts is None or num_drafts >= len(promise.lengths):
        return None
    wanted = promise.lengths[num_drafts] - 1
    if evidence.per_round >= (1 - 2 * _SLACK) * wanted:
        return None
    return f"promised were {wanted:.2f} in a round with K = {num_drafts} ({promise.source})."


def _shown(evidence: Evidence) -> str:
    of = f"{evidence.rounds} rounds, {evidence.source}"
    if evidence.interval is None:
        return f"about {percent(evidence.low)} of first drafts were accepted ({of}: an estimate)"
    if evidence.is_exact:
        low, high = evidence.interval
        return (
            f"{percent(evidence.low)} of first drafts were accepted (95 % interval "
            f"{percent(low)} to {percent(high)}; {of})"
        )
    mean = "" if evidence.per_round is None else f"{evidence.per_round:.2f} drafts a round, so "
    bounds = f"{percent(evidence.low)} to {percent(evidence.high)}"
    return f"{mean}{bounds} of first drafts were accepted ({of})"


def percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"


def promise_of(file: Path) -> Promise:
    """Out of what `headstart score --json` printed; the least of its vocabularies."""
    try:
        document = parse_json(read_plain(file))
        found = [_promised(result["overall"], document, file) for result in document["results"]]
        return min(found, key=lambda promise: promise.rate)
    except OSError as error:
        raise DataError(
            f"{file} cannot be read ({why_unreadable(error)}). Give what `headstart score --json` "
            "printed."
        ) from None
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError(
            f"{file} is no report of `headstart score --json` ({type(error).__name__}: {error}). "
            "Write one: headstart score MODEL --data DATA --json > FILE."
        ) from None


def found_promise(*folders: Path | None) -> Promise | None:
    """Of score.json in one of the folders; None where none has it."""
    files = [folder / SCORE_NAME for folder in folders if folder is not None]
    return next((promise_of(file) for file in files if file.is_file()), None)


def _promised(overall: Mapping[str, Any], document: Mapping[str, Any], file: Path) -> Promise:
    if "walked" in overall:
        own = overall["walked"]
        spread = own["cumulative_acceptance_interval"]
    else:
        own = overall["formula"][document["formula"]]["row_average"]
        spread = None
    rate = float(own["cumulative_acceptance"][0])
    low = rate if spread is None else float(spread[0][0])
    lengths = tuple(float(length) for length in own["acceptance_length"])
    return Promise(source=file.name, rate=rate, low=low, lengths=lengths)
