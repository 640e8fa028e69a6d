"""K that falls and rises from round to round: same text, same drafts; interpreted on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.engine_runs import ids_of
from support.kernel_runs import BLOCK_BYTES, SIZES
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from headstart.engine.cost import NEVER_PAYS
from headstart.engine.device_loop import DeviceLoop
from headstart.engine.round_costs import RoundTable

from headstart.backends.cuda import rounds
from headstart.backends.cuda.rounds import Kind
from headstart.engine import device_loop
from headstart.engine import parts as parts_module
from headstart.engine.engine import Engine
from headstart.engine.options import MENU
from headstart.engine.request import Request
from headstart.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_kernels")

PROMPTS = [[9, 10, 11, 12, 13], [20, 21, 22, 23, 24]]
COSTS = RoundTable(((1, tuple((drafts, 1.0) for drafts in MENU)),))
# By steps of the menu, by several, off the menu, and from none after one round and after many.
FALLING = [8, 5, 3, 2, 1, 0, 5, 4, 0, 3, *[0] * 16, 2]


@dataclass
class Play:
    """What a run said, by which rounds, and what the head guessed where."""

    texts: list[list[int]]
    kinds: list[Kind] = field(default_factory=list)
    falls: set[tuple[int, int]] = field(default_factory=set)  # wanted -> the round's own
    guesses: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def folder(tiny: Tiny) -> Path:
    return tiny("mimo", rate=0.7, seed=1, dtype="F32", **SIZES)


def params(number: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0, max_tokens=34 - 7 * i, ignore_eos=True) for i in range(number)
    ]


@pytest.fixture(scope="module")
def steady(folder: Path) -> Play:
    """By plain PyTorch, with as many drafts in every step."""
    engine = Engine(folder, dtype="float32", speculate=8, kernels="off", kv_bytes=1 << 20)
    assert engine.drafter is not None
    found, propose = Play([]), engine.drafter.propose

    def guessing(drafting: dict[Request, int]) -> None:
        propose(drafting)
        for request in drafting:
            found.guesses[request.tokens[0], len(request.tokens)] = tuple(request.drafts)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.drafter, "propose", guessing)
        found.texts = ids_of(engine.generate(PROMPTS, params(len(PROMPTS))))
    return found


def play(folder: Path, ks: Sequence[int], *, headless: Sequence[int], num_blocks: int) -> Play:
    """Rounds that want these numbers of drafts, one after the other, again and again."""
    with pytest.MonkeyPatch.context() as patched:  # nothing here is decided by times
        patched.setattr(parts_module, "measure_both", lambda *_, **__: (NEVER_PAYS, None))
        patched.setattr(device_loop, "profile_rounds", lambda *_: COSTS)
        engine = Engine(
            folder, dtype="float32", block_size=4, kernels="on", speculate="auto",
            kv_bytes=num_blocks * BLOCK_BYTES, max_running_requests=len(PROMPTS),
        )  # fmt: skip
    assert engine.policy is not None and isinstance(engine.loop, DeviceLoop)
    found, own, number, wanted = Play([]), engine.loop.seating, 0, 0
    run, draft = own.kinds.run, rounds._drafts

    def choose(
        requests: list[Request], num_running: int, *, is_seated: bool = False
    ) -> dict[Request, int]:
        nonlocal number, wanted
        if not is_seated:
            return dict.fromkeys(requests, 0)
        wanted = ks[number % len(ks)]
        number += 1
        return {request: 0 if request.is_headless else wanted for request in requests}

    def watched(kind: Kind) -> bool:
        count = len(own.taken)
        assert not kind.head_rows or max(own.seats.pending[:count].tolist()) <= kind.head_rows
        assert max(own.seats.limits[:count].tolist()) <= kind.num_drafts <= own.seats.max_drafts
        found.kinds.append(kind)
        if kind.num_drafts > wanted:
            found.falls.add((wanted, kind.num_drafts))
        return run(kind)

    def guessing(model: Any, seats: Any, kind: Kind) -> Any:
        drafts = draft(model, seats, kind)
        for at, request in own.taken.items():
            end, most = int(seats.lengths[at]), min(int(seats.limits[at]), int(seats.left[at]) - 1)
            if most > 0:
                guess = tuple(int(of_all[at]) for of_all in drafts[:most])
                before = found.guesses.get((request.tokens[0], end), ())
                found.guesses[request.tokens[0], end] = max(guess, before, key=len)
        return drafts

    engine.loop._headless = None
    engine.scheduler.goes_headless = lambda request: request.arrival in headless
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.policy, "choose", choose)
        patched.setattr(own.kinds, "run", watched)
        patched.setattr(rounds, "_drafts", guessing)
        found.texts = ids_of(engine.generate(PROMPTS, params(len(PROMPTS))))
    assert engine.pool.num_used == 0
    assert engine.stats.preemptions and engine.stats.headless == len(headless)
    return found


def agreeing(one: Play, other: Play) -> int:
    """How many guesses at the same place begin alike; all that there are must."""
    places = one.guesses.keys() & other.guesses.keys()
    for place in places:
        pairs = zip(one.guesses[place], other.guesses[place], strict=False)
        assert all(a == b for a, b in pairs), place
    return len(places)


def test_falling_k_changes_neither_text_nor_drafts(folder: Path, steady: Play) -> None:
    """Beside a request without a head, and with so little memory that one has to start again."""
    found = play(folder, FALLING, headless=(1,), num_blocks=16)
    assert steady.texts == found.texts
    assert agreeing(steady, found) >= 5
    assert found.falls == {(5, 8), (3, 5), (2, 3), (4, 5)}, "once more, and where 4 is rounded up"
    assert any(kind.head_rows == 16 for kind in found.kinds), "and the head read a whole window"
