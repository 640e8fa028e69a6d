"""The gate: places are counted, given back, and never less than none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.errors import RequestError
from headstart.server.completions import CompletionRequest
from headstart.server.intake import Gate
from headstart.server.options import ServerOptions
from headstart.server.protocol.requests import ChatRequest, SamplingFields
from headstart.server.refusals import Refusal


def with_gate(check: Callable[[Gate], None], *, running: int = 2, max_queue: int = 1) -> None:
    """A gate belongs to an event loop."""
    engine = SimpleNamespace(options=SimpleNamespace(max_running_requests=running))
    worker: Any = SimpleNamespace(failure=None, is_ready=True, engine=engine)

    async def run() -> None:
        gate = Gate(worker, max_queue=max_queue)
        with pytest.raises(Refusal, match="is being loaded"):
            gate.check()
        gate.is_open = True
        check(gate)

    asyncio.run(run())


def test_places_are_counted_by_answers_and_given_back() -> None:
    def check(gate: Gate) -> None:
        with gate.entry(2), gate.entry(1):
            assert gate.num_open == 3
            with pytest.raises(Refusal) as refused, gate.entry(1):
                pass
            assert refused.value.status == 429 and int(refused.value.headers["Retry-After"]) >= 1
        assert gate.num_open == 0
        with pytest.raises(ZeroDivisionError), gate.entry(3):
            raise ZeroDivisionError
        assert gate.num_open == 0

    with_gate(check)


def test_more_answers_than_places_are_the_requests_fault() -> None:
    def check(gate: Gate) -> None:
        with pytest.raises(RequestError, match="wants 4 answers and this server has 3") as refused:
            gate.entry(4, field="n").__enter__()
        assert refused.value.field == "n"

    with_gate(check)


@pytest.mark.parametrize("number", [0, -1, -(10**6)])
def test_a_number_below_one_opens_nothing(number: int) -> None:
    """Regression: a negative n made room for others, and a server with answers seem empty."""

    def check(gate: Gate) -> None:
        with ExitStack() as stack:
            stack.enter_context(gate.entry(1))
            with pytest.raises(AssertionError):
                stack.enter_context(gate.entry(number))
            assert gate.num_open == 1 and not gate._empty.is_set()

    with_gate(check)


@pytest.mark.parametrize("number", [0, -5])
@pytest.mark.parametrize(
    "request_of",
    [
        lambda n: ChatRequest.model_validate({"messages": [{"role": "user"}], "n": n}),
        lambda n: CompletionRequest(prompt=["a", "b"], n=n),
    ],
    ids=["chat", "completion"],
)
def test_no_such_number_gets_to_the_gate(
    request_of: Callable[[int], SamplingFields], number: int
) -> None:
    with pytest.raises(Refusal, match=f"n is {number}; give at least 1") as refused:
        request_of(number).check(ServerOptions())
    assert refused.value.param == "n"


def test_who_comes_while_the_server_starts_drains_or_is_dead_is_told_so() -> None:
    def check(gate: Gate) -> None:
        gate.is_draining = True
        with pytest.raises(Refusal, match="shutting down") as refused:
            gate.check()
        assert refused.value.status == 503
        worker: Any = gate._worker
        worker.failure = RuntimeError()
        with pytest.raises(Refusal, match="has failed"):
            gate.check()
        worker.failure, worker.is_ready, gate.is_draining = None, False, False
        with pytest.raises(Refusal, match="being loaded"):
            gate.check()

    with_gate(check)
