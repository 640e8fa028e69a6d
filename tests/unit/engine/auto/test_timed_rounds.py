"""Rounds count in which all requests decode; that some wait for memory is no round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headstart.engine.auto.host_times import _timed
from headstart.engine.auto.timed_rounds import Cell, HostTimer, Serving, TimedRound
from headstart.engine.request import Request
from headstart.engine.stats import EngineStats
from headstart.errors import EngineError
from headstart.sampling.params import SamplingParams

ROWS = 8  # of a prompt that a step reads


@dataclass
class Steps:
    """An engine that has memory for so many requests and reads one part of a prompt in a step."""

    memory: int
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    num_preemptions: int = 0
    preempts: bool = False
    sources: None = None
    stats: EngineStats = field(default_factory=EngineStats)
    times: Any = field(default_factory=lambda: SimpleNamespace(besides=0.25))
    were_reading: list[bool] = field(default_factory=list)  # by step, whether a prompt was read
    emitted: int = 1  # tokens of a request in a step

    @property
    def core(self) -> Any:
        model = SimpleNamespace(max_len=10_000, config=SimpleNamespace(vocab=99), head=None)
        self.pool = SimpleNamespace(num_slots=10_000)
        options = SimpleNamespace(num_rows=ROWS, is_automatic=False, speculate=0)
        return SimpleNamespace(
            scheduler=self, loop=self, options=options, backend=SimpleNamespace(model=model)
        )

    def add(self, request: Request, siblings: Sequence[Request]) -> None:
        self.waiting.append(request)

    def step(self) -> None:
        self.stats.trunk_seconds += 2.5
        decoding = [request for request in self.running if request.is_decoding]
        while self.waiting and len(self.running) < self.memory:
            self.running.append(self.waiting.pop(0))
        for request in decoding:
            tokens = min(self.emitted, request.room)
            request.tokens += [1] * tokens
            request.num_computed += tokens
            if not request.room:
                self.running.remove(request)
        reading = [request for request in self.running if not request.is_decoding][:1]
        for request in reading:
            request.num_computed = min(len(request.tokens), request.num_computed + ROWS)
            if request.num_computed == len(request.tokens):
                request.tokens.append(1)
        self.were_reading.append(bool(reading))
        if self.preempts and len(decoding) == 3:
            self.waiting.append(self.running.pop())
            self.num_preemptions += 1


def timer(steps: Steps, prompt: int = 20, answer: int = 200) -> HostTimer:
    serving = Serving(SamplingParams(), [[1] * prompt], answer, requests=3, max_drafts=2)
    prompts = SimpleNamespace(tokenizer=None, end_ids=frozenset())
    return HostTimer(cast(Any, steps.core), cast(Any, prompts), serving)


def test_steps_that_read_prompts_are_no_rounds() -> None:
    """A prompt of many passes was counted as rounds."""
    steps = Steps(memory=3)
    found = timer(steps, prompt=10 * ROWS).rounds(Cell(0))
    assert sum(steps.were_reading) == 30 and not any(steps.were_reading[-15:])
    assert len(steps.were_reading) == 30 + 3 + 12, "some settle, and then twelve count"
    assert [own.context for own in found] == [*range(found[0].context, found[-1].context + 1, 3)]
    assert {(own.verify, own.besides, own.deciding) for own in found} == {(2.5, 0.25, 0.0)}


def test_few_rounds_are_timed_where_they_take_long() -> None:
    assert len(timer(Steps(memory=3)).rounds(Cell(0), -1.0)) == 2


def test_without_room_for_so_many_drafts_the_last_round_counts() -> None:
    found = timer(Steps(memory=3), answer=16).rounds(Cell("auto", 16))
    assert len(found) == 1 and found[0].context > 60


@pytest.mark.parametrize("preempts", [False, True])
def test_requests_that_wait_for_memory_are_an_error(preempts: bool) -> None:
    """Rounds of fewer requests than will be served were counted."""
    steps = Steps(memory=3 if preempts else 2, preempts=preempts)
    with pytest.raises(EngineError, match=r"is 3, and there is memory for 2 .* Lower --requests"):
        timer(steps).rounds(Cell(0))


def test_answers_that_end_while_others_are_read_are_an_error_unless_they_are_longer() -> None:
    steps = Steps(memory=3)
    own = timer(steps, prompt=10 * ROWS, answer=5)
    with pytest.raises(EngineError, match="never decoded all at once: prompts of up to 80 tokens"):
        own.rounds(Cell(0))
    longer = own.serving.outlasting(ROWS)
    assert longer.answer_tokens == 2 * 20 * 17 and longer.outlasting(ROWS) == longer
    for emitted in (1, 17):
        steps = Steps(memory=3, emitted=emitted)
        assert timer(steps, prompt=10 * ROWS, answer=longer.answer_tokens).rounds(Cell(0))


@pytest.mark.parametrize(("seconds", "turns"), [(0.0, 40), (3.0, 5), (20.0, 4), (1000.0, 2)])
def test_a_slow_engine_is_timed_in_fewer_turns(
    seconds: float, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a minute it is not five turns, but two at least."""
    now, allowed = [0.0], set[float]()

    class Timer:
        def begin(self, turn: int) -> None: ...

        def rounds(self, cell: Cell, longest: float) -> list[TimedRound]:
            allowed.add(longest)
            now[0] += seconds / 3
            return [TimedRound(seconds, 1, 0.0, 0.0, 0.0, could_copy=False)]

    monkeypatch.setattr("headstart.engine.auto.host_times.time.perf_counter", lambda: now[0])
    done = list[int]()
    cells = [Cell("auto", 1), Cell("auto", 2)]
    found = _timed(cast(Any, {0: Timer(), "auto": Timer()}), cells, 1, done.append)
    assert len(done) == turns and {len(own) for own in found.values()} == {turns}
    assert allowed == {4.0}, "a minute, five turns of three visits"
