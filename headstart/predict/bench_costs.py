"""What rounds cost by a report of `headstart bench run`: of any server, at the load that it had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.engine.auto.costs import curve_at
from headstart.errors import DataError, some
from headstart.models.build import LoadedModel
from headstart.simulate.cost import Costs


@dataclass(frozen=True)
class BenchCosts:
    """Seconds of a round by K: time per output token times acceptance length.

    Between and beyond the measured K along the line through the nearest two.
    """

    rounds: tuple[tuple[int, float], ...]
    requests: int
    name: str

    @property
    def origin(self) -> str:
        measured = ", ".join(str(drafts) for drafts, _ in self.rounds)
        return f"from {self.name}, which has K = {measured}; requests at once: {self.requests}"

    def of(self, model: LoadedModel, size: int | None) -> Costs:
        """A report says nothing of other draft vocabularies than its own."""
        return self

    def round_seconds(self, batch: int, drafts: int) -> float:
        assert batch == self.requests
        return curve_at(self.rounds, drafts)


def bench_costs(document: Mapping[str, Any], name: str, requests: int) -> BenchCosts:
    """From a report as `headstart bench` wrote it; DataError where it does not say enough."""
    drafts = {each["name"]: each["drafts"] for each in document.get("variants", [])}
    loads, rounds = set(), {}
    for cell in document["cells"]:
        count = drafts.get(cell["variant"])
        if type(count) is not int or cell["concurrency"] is None:
            continue
        loads.add(cell["concurrency"])
        spread, speculation = cell["measures"]["tpot_seconds"], cell["speculation"] or {}
        seconds = spread.get("mean") if isinstance(spread, dict) else spread
        length = 1.0 if count == 0 else speculation.get("acceptance_length")
        if cell["concurrency"] == requests and seconds and length:
            rounds[count] = seconds * length
    if 0 not in rounds or len(rounds) < 2:
        raise DataError(
            f"{name} does not say what rounds of {requests} request(s) take with and without "
            f"drafts (it has loads of {some(sorted(loads)) or 'none'}). Give --requests as it was "
            "measured, or run `headstart bench run` with --compare 0,3 and that concurrency."
        )
    return BenchCosts(tuple(sorted(rounds.items())), requests, name)
