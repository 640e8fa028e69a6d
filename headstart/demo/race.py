"""The same question to two engines, without and with drafts, in turns.

Always the one steps that has used less time, so both see the machine in the same state and a
viewer sees them go as fast, in proportion, as they are. Only time inside the engines counts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from headstart.data.prompt_reader import Prompt
    from headstart.engine.compare import Divergence
    from headstart.engine.engine import Engine
    from headstart.engine.output import Completion, Update
    from headstart.sampling.acceptance import Acceptance
    from headstart.sampling.params import SamplingParams

Side = Literal["plain", "drafted"]
SIDES: tuple[Side, Side] = ("plain", "drafted")
Show = Callable[[Side, "Update", float], None]  # gets what came, and the side's seconds so far


@dataclass(frozen=True)
class Race:
    """How one question went."""

    category: str
    question: str
    seconds: dict[Side, float]
    answers: dict[Side, Completion]
    chosen_drafts: dict[int, int]  # K -> rounds
    divergence: Divergence | None  # the first place where the texts differ

    @property
    def rates(self) -> dict[Side, float]:
        """Tokens per second, the prompt's time included."""
        return {side: len(self.answers[side].token_ids) / self.seconds[side] for side in SIDES}

    @property
    def speed_up(self) -> float:
        return self.rates["drafted"] / self.rates["plain"]

    @property
    def acceptance(self) -> Acceptance:
        return self.answers["drafted"].stats.acceptance

    def as_json(self) -> dict[str, Any]:
        return {
            "category": self.category,
            "question": self.question,
            "tokens_per_second": self.rates,
            "speed_up": self.speed_up,
            "acceptance": self.acceptance.as_json(),
            "chosen_drafts": self.chosen_drafts,
            "divergence": asdict(self.divergence) if self.divergence else None,
            "texts": {side: self.answers[side].text for side in SIDES},
        }


@dataclass
class _Runner:
    engine: Engine
    request_id: str
    seconds: float = 0.0

    def step(self) -> list[Update]:
        started = time.perf_counter()
        updates = self.engine.step()
        self.seconds += time.perf_counter() - started
        return [update for update in updates if update.request_id == self.request_id]


def race(
    engines: dict[Side, Engine],
    question: str,
    params: SamplingParams,
    *,
    category: str = "",
    show: Show = lambda side, update, seconds: None,
) -> Race:
    """Answer `question` with both; nothing is left in the engines when this ends or fails."""
    from headstart.engine.compare import find_divergence

    prompt: Prompt = [{"role": "user", "content": question}]
    before = Counter(engines["drafted"].stats.chosen_drafts)
    runners = {side: _Runner(engines[side], engines[side].add(prompt, params)) for side in SIDES}
    try:
        while waiting := [side for side in SIDES if runners[side].engine.has_work]:
            side = min(waiting, key=lambda name: runners[name].seconds)
            for update in runners[side].step():
                show(side, update, runners[side].seconds)
    finally:
        for runner in runners.values():
            runner.engine.abort(runner.request_id)
        results = {side: runners[side].engine.collect(runners[side].request_id) for side in SIDES}
    answers = {side: result.outputs[0] for side, result in results.items()}
    chosen = Counter(engines["drafted"].stats.chosen_drafts)
    chosen.subtract(before)
    return Race(
        category, question, {side: runners[side].seconds for side in SIDES}, answers,
        {drafts: rounds for drafts, rounds in sorted(chosen.items()) if rounds},
        find_divergence(
            engines["drafted"], results["plain"].prompt_token_ids, params,
            answers["plain"].token_ids, answers["drafted"].token_ids,
        ),
    )  # fmt: skip


def best_drafts(races: list[Race]) -> int:
    """The K that `auto` chose most often."""
    total: Counter[int] = Counter()
    for one in races:
        total.update(one.chosen_drafts)
    return total.most_common(1)[0][0] if total else 0


def mean_speed_up(races: list[Race]) -> float:
    return sum(one.speed_up for one in races) / len(races)
