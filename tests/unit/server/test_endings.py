"""How requests and servers end: each request is counted once, and the exit code has its reason."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.errors import EngineError
from headstart.server.answering import Answering
from headstart.server.completions import CompletionRequest, prepare_completion
from headstart.server.lifecycle import Serving
from headstart.server.options import ServerOptions, listen
from headstart.server.refusals import Refusal, engine_failed, stopped, too_slow
from headstart.server.state import Tally


def test_a_tally_counts_by_status() -> None:
    tally = Tally(finished=3)
    tally.count(Refusal(400, "no"))  # in the metrics only
    assert str(tally) == "3 requests finished, 0 aborted"
    for refusal in (too_slow(3), stopped(), Refusal(503, "later"), engine_failed()):
        tally.count(refusal)
    assert str(tally) == "3 requests finished, 2 aborted, 1 failed"


def answered(*, fails: bool) -> tuple[Tally, str | None]:
    """A client that takes no answer, and leaves when one begins or while one is made."""
    tally, begun = Tally(), asyncio.Event()

    async def work(*_: Any) -> None:
        if fails:
            raise EngineError("broken")
        begun.set()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def receive() -> dict[str, str]:
        await begun.wait()
        return {"type": "http.disconnect"}

    state: Any = SimpleNamespace(
        options=SimpleNamespace(request_timeout_seconds=60.0), tally=tally,
        gate=SimpleNamespace(entry=lambda *_, **__: nullcontext()),
    )  # fmt: skip
    answering = Answering(state, CompletionRequest(prompt="x"), "cmpl-1", prepare_completion)
    answering._answer = work
    asyncio.run(answering({"type": "http"}, receive, send))
    return tally, answering._record.error


def test_who_leaves_while_being_told_of_a_failure_is_counted_once() -> None:
    tally, error = answered(fails=True)
    assert (tally.failed, tally.aborted) == (1, 0) and error is not None and "engine" in error
    tally, error = answered(fails=False)  # the control
    assert (tally.failed, tally.aborted) == (0, 1) and error == "the client went away"


@pytest.mark.parametrize(
    ("endings", "expected"),
    [
        ([(0, "drained"), (0, "again")], (0, "drained")),
        ([(143, "a second signal"), (0, "drained")], (143, "a second signal")),
        ([(0, "drained"), (1, "the engine failed")], (1, "the engine failed")),
        ([(1, "the engine failed"), (143, "a second signal")], (1, "the engine failed")),
    ],
    ids=["good", "worst first", "worst last", "both bad"],
)
def test_code_and_reason_are_of_the_same_ending(
    endings: list[tuple[int, str]], expected: tuple[int, str]
) -> None:
    def make_engine() -> Any:
        raise AssertionError("not called")

    with listen(ServerOptions(port=0)) as listener:
        serving = Serving("model", ServerOptions(), make_engine, listener)
        serving._server = SimpleNamespace(should_exit=False)
        for code, reason in endings:
            serving._end(code, reason)
        assert (serving._code, serving._reason) == expected
