"""`auto` finds its K from the first round on, on machines that are busy: simulated, no clock.

Rounds cost what rounds of a small model were seen to cost on a CPU, in milliseconds. Every pass
takes longer by noise; there are slow spells in which all takes twice as long, and a machine's
speed wanders. The policy sees those times alone. It is judged by what its choices cost without
noise, beside the best fixed K.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from headstart.engine.auto.costs import RoundCosts
from headstart.engine.auto.policy import DraftPolicy
from headstart.engine.auto.profile import profile_host_rounds
from headstart.engine.options import EngineOptions
from headstart.engine.request import Request
from headstart.sampling.params import SamplingParams

PLAIN, ROW, FIRST_DRAFT, DRAFT, REST = 4.7, 0.45, 0.95, 0.14, 0.4
SHORT_CONTEXT = 0.92  # of a pass of the profile, over one of a long text
RIGHT = {"easy": (0.85, 0.8, 0.75, 0.7, 0.7), "hard": (0.6, 0.45, 0.4, 0.4, 0.4)}
ROUNDS, ANSWER = 700, 120


def verify_ms(drafts: int) -> float:
    return PLAIN + ROW * drafts


def draft_ms(drafts: int) -> float:
    return FIRST_DRAFT + DRAFT * (drafts - 1) if drafts else 0.0


@dataclass
class Machine:
    """Runs passes of known length; `spells`: the share of time in which all takes twice as long."""

    seed: int
    noise: float
    spells: float
    wandering: float = 0.15
    now: float = 0.0
    _level: float = 0.0
    _until: float = 0.0
    _is_slow: bool = False
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def run(self, milliseconds: float) -> float:
        """The seconds that it takes."""
        if self.now >= self._until:
            self._is_slow = self.draw.random() < self.spells
            self._until = self.now + self.draw.uniform(0.03, 0.4)
        self._level = 0.995 * self._level + 0.1 * self.wandering * self.draw.gauss(0, 1)
        factor = math.exp(self._level + abs(self.draw.gauss(0, self.noise)))
        took = milliseconds / 1e3 * factor * (2 if self._is_slow else 1)
        self.now += took
        return took


@dataclass
class Passes:
    """What is profiled at start, on the same machine."""

    machine: Machine

    def has_room(self, batch: int, drafts: int) -> bool:
        return batch == 1

    def verify_seconds(
        self, batch: int, counts: Sequence[int], params: SamplingParams
    ) -> list[float]:
        return self._least([SHORT_CONTEXT * verify_ms(drafts) for drafts in counts])

    def draft_seconds(
        self, batch: int, counts: Sequence[int], params: SamplingParams
    ) -> list[float]:
        return self._least([draft_ms(drafts) for drafts in counts])

    def _least(self, each: Sequence[float]) -> list[float]:
        turns = [[self.machine.run(one) for one in each] for _ in range(4)]
        return [min(own) for own in zip(*turns, strict=True)]


@dataclass
class Text:
    """Which drafts are right; the same for every K."""

    rates: Sequence[float]
    seed: int

    def accepted(self, place: int, drafts: int) -> int:
        draw, right = random.Random(f"{self.seed}/{place}"), 0
        while right < drafts and draw.random() < self.rates[min(right, len(self.rates) - 1)]:
            right += 1
        return right


def fixed_speed(text: Text, drafts: int) -> float:
    """Tokens per millisecond."""
    tokens = rounds = 0
    while rounds < ROUNDS:
        tokens += 1 + text.accepted(tokens, drafts)
        rounds += 1
    return tokens / (rounds * (verify_ms(drafts) + draft_ms(drafts) + REST))


def auto_speed(text: Text, machine: Machine, costs: RoundCosts | None = None) -> float:
    sampled, greedy = profile_host_rounds(Passes(machine), max_batch=1)
    own = DraftPolicy(EngineOptions(speculate="auto"), 10**6, costs or sampled, costs or greedy)
    tokens, spent, one = 0, 0.0, None
    for number in range(ROUNDS):
        if one is None or one.num_output >= ANSWER:
            if one is not None:
                own.forget(one)
            params = SamplingParams(temperature=0)
            one = Request(str(number), [1] * 60, params, 0, 10**5, frozenset(), 0)
        drafts = own.choose([one], 1)[one]
        if drafts:
            own.observe_drafts({one: drafts}, machine.run(draft_ms(drafts)))
        own.observe_verify([one], drafts + 1, machine.run(verify_ms(drafts)))
        own.observe_overhead(machine.run(REST))
        right = text.accepted(tokens, drafts)
        own.observe(one, drafts, right)
        tokens += right + 1
        one.tokens += [0] * (right + 1)
        spent += verify_ms(drafts) + draft_ms(drafts) + REST
    return tokens / spent


def ratios(kind: str, noise: float, spells: float, costs: RoundCosts | None = None) -> list[float]:
    """Over the best fixed K, one for each start."""
    found = []
    for seed in range(4):
        text = Text(RIGHT[kind], seed)
        best = max(fixed_speed(text, drafts) for drafts in range(6))
        found.append(auto_speed(text, Machine(seed, noise, spells), costs) / best)
    return found


@pytest.mark.parametrize("kind", list(RIGHT))
@pytest.mark.parametrize(("noise", "spells"), [(0.05, 0.0), (0.2, 0.5)], ids=["quiet", "busy"])
def test_auto_finds_its_k_from_a_cold_start(kind: str, noise: float, spells: float) -> None:
    found = ratios(kind, noise, spells)
    assert sum(found) / len(found) > 0.97, found
    assert min(found) > 0.93, found


def test_a_profile_that_a_bad_spell_has_spoilt_is_mended_by_tries() -> None:
    """Regression: with more than one draft profiled 1.6 times too dear K stayed at 1 for minutes.

    A quarter of the wrong K costs most of what is lost here, in the first rounds.
    """
    wrong = tuple((k, verify_ms(k) / 1e3 * (1.6 if k > 1 else 1)) for k in (0, 1, 2, 3, 5, 8))
    spoilt = RoundCosts(((1, wrong),), ((1, DRAFT / 1e3),), ((1, (FIRST_DRAFT - DRAFT) / 1e3),))
    found = ratios("easy", 0.05, 0.0, spoilt)
    assert sum(found) / len(found) > 0.93, found


def test_one_draft_would_not_do() -> None:
    """The control: what the choice that stayed for minutes was worth."""
    text = Text(RIGHT["easy"], 0)
    assert fixed_speed(text, 1) < 0.85 * max(fixed_speed(text, drafts) for drafts in range(6))
