"""K that falls and rises from round to round: same text, same drafts; interpreted on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.engine_runs import ids_of
from support.kernel_runs import BLOCK_BYTES, SIZES
from support.long_runs import long_only
from support.tiny_fixture import Tiny

pytest.importorskip("triton")


from headstart.backends.cuda import graphs
from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.device_rounds import CapturedRounds
from headstart.backends.cuda.round_model import RoundModel
from headstart.backends.cuda.shapes import DraftShape, RoundShape
from headstart.engine import core
from headstart.engine.auto.costs import NEVER_PAYS
from headstart.engine.engine import Engine
from headstart.engine.request import Request
from headstart.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_kernels")

PROMPTS = [[9, 10, 11, 12, 13], [20, 21, 22, 23, 24]]
# By steps of the menu, by several, off the menu, and from none after one round and after many.
FALLING = [8, 5, 3, 2, 1, 0, 5, 4, 0, 3, *[0] * 16, 2]


@dataclass
class Play:
    """What a run said, by which rounds, and what the head guessed where."""

    texts: list[list[int]]
    shapes: list[RoundShape] = field(default_factory=list)
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
    assert engine.loop.drafter is not None
    found, propose = Play([]), engine.loop.drafter.propose

    def guessing(drafting: dict[Request, int]) -> None:
        propose(drafting)
        for request in drafting:
            found.guesses[request.tokens[0], len(request.tokens)] = tuple(request.drafts)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.loop.drafter, "propose", guessing)
        found.texts = ids_of(engine.generate(PROMPTS, params(len(PROMPTS))))
    return found


def play(folder: Path, ks: Sequence[int], *, num_blocks: int) -> Play:
    """Rounds that want these numbers of drafts, one after the other, again and again."""
    with pytest.MonkeyPatch.context() as patched:  # nothing here is decided by times
        patched.setattr(core, "profile_host_rounds", lambda *_, **__: (NEVER_PAYS, None))
        engine = Engine(
            folder, dtype="float32", block_size=4, kernels="on", speculate="auto",
            kv_bytes=num_blocks * BLOCK_BYTES, max_running_requests=len(PROMPTS),
        )  # fmt: skip
    assert engine.policy is not None and engine.loop.rounds is not None
    found, own, number, wanted = Play([]), engine.loop.rounds, 0, 0
    device = own._device
    assert isinstance(device, CapturedRounds)
    run, draft = device.graphs.run, graphs.run_drafts

    def choose(
        requests: list[Request], num_running: int, *, uniform: bool = False
    ) -> dict[Request, int]:
        nonlocal number, wanted
        if not uniform:
            return dict.fromkeys(requests, 0)
        wanted = ks[number % len(ks)]
        number += 1
        return dict.fromkeys(requests, wanted)

    def watched(shape: RoundShape) -> bool:
        count, batch = len(own.requests), device.batch
        assert not shape.head_rows or max(batch.pending[:count].tolist()) <= shape.head_rows
        assert max(batch.limits[:count].tolist()) <= shape.num_drafts <= batch.max_drafts
        found.shapes.append(shape)
        if shape.num_drafts > wanted:
            found.falls.add((wanted, shape.num_drafts))
        return run(shape)

    def guessing(model: RoundModel, batch: DecodeBatch, shape: DraftShape) -> None:
        draft(model, batch, shape)
        for request, at in own.requests.items():
            end, most = int(batch.lengths[at]), min(int(batch.limits[at]), int(batch.left[at]) - 1)
            if most > 0:
                guess = tuple(batch.ids[at, 1 : 1 + most].tolist())
                before = found.guesses.get((request.tokens[0], end), ())
                found.guesses[request.tokens[0], end] = max(guess, before, key=len)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.policy, "choose", choose)
        patched.setattr(device.graphs, "run", watched)
        patched.setattr(graphs, "run_drafts", guessing)
        found.texts = ids_of(engine.generate(PROMPTS, params(len(PROMPTS))))
    assert engine.pool.num_used == 0 and engine.stats.preemptions
    return found


def agreeing(one: Play, other: Play) -> int:
    """How many guesses at the same place begin alike; all that there are must."""
    places = one.guesses.keys() & other.guesses.keys()
    for place in places:
        pairs = zip(one.guesses[place], other.guesses[place], strict=False)
        assert all(a == b for a, b in pairs), place
    return len(places)


@long_only
def test_falling_k_changes_neither_text_nor_drafts(folder: Path, steady: Play) -> None:
    """With so little memory that a request has to start again."""
    found = play(folder, FALLING, num_blocks=16)
    assert steady.texts == found.texts
    assert agreeing(steady, found) >= 5
    assert found.falls == {(5, 8), (3, 5), (2, 3), (4, 5)}, "once more, and where 4 is rounded up"
    assert any(shape.head_rows == 16 for shape in found.shapes), "and the head read a whole window"
