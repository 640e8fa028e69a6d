"""Grammars that take too much: memory, time to compile, time to follow; and what is kept."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from support.grammar_walks import MAX_SECONDS, ids, walk

from headstart.errors import EngineError, RequestError
from headstart.server.forks import WAIT_FACTOR, ForkServer
from headstart.server.grammars.client import CompilerProcess
from headstart.server.grammars.compiler import GrammarCompiler
from headstart.server.grammars.process import THREADS, available_threads
from headstart.server.grammars.specs import GrammarSpec, json_schema, regex, schema_format
from headstart.server.refusals import Refusal


def test_a_grammar_that_needs_much_memory_is_given_up(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler._process, "_max_memory", 4 << 20)
    monkeypatch.setattr(compiler._process, "_threads", 1)  # others have address space of their own
    with pytest.raises(RequestError, match="needs more than 4 MiB to compile"):
        compiler.compile(json_schema({"enum": [f"{i:05}" for i in range(2000)]}))
    compiler.compile(json_schema({"enum": ["a few", "words"]}))


def test_one_thread_compiles_where_some_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """xgrammar would wait for ever for those that are missing."""
    assert available_threads(3) == 3 and available_threads(1) == 1
    start, started = threading.Thread.start, []

    def refused(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert available_threads(3) == 1
    assert len(started) == 2 and not any(thread.is_alive() for thread in started)


WATCHED = """
import hashlib, threading, time
from headstart.server.grammars import process

time.process_time = lambda: 0.0  # a busy machine gives hardly any of a processor
process._STUCK_SECONDS, process._LOOK_SECONDS = 0.1, 0.01
threading.Thread(target=process._end_if_stuck, args=[threading.Event()], daemon=True).start()
{}
"""


@pytest.mark.parametrize(
    ("work", "code"),
    [("threading.Event().wait(60)", 1), ("hashlib.pbkdf2_hmac('sha1', b'', b'', 1_000_000)", 0)],
    ids=["waits", "computes"],
)
def test_only_a_process_that_waits_is_stuck(work: str, code: int) -> None:
    """Regression: on a busy machine one that waited for a processor was ended."""
    done = subprocess.run([sys.executable, "-c", WATCHED.format(work)], timeout=60)
    assert done.returncode == code


def test_a_grammar_is_not_blamed_for_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForkServer, "_start", lambda self: None)
    process = CompilerProcess("{}", max_seconds=1, max_memory=1 << 30)
    for seconds, error in ((1.0, RequestError), (WAIT_FACTOR, Refusal)):
        monkeypatch.setattr(process, "_ask", lambda _, own=seconds: ({}, b"", own))
        with pytest.raises(error, match="1 s to compile" if error is RequestError else "busy"):
            process.compile("regex", "{}")


def nested(depth: int) -> Any:
    schema: Any = True
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_a_bomb_is_given_up_in_time_and_keeps_nobody_waiting(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match="more than 48 levels deep"):
        json_schema(nested(60))
    bomb = GrammarSpec.of("JSON schema", schema_format(nested(450)))
    ends: list[str] = []

    def explode() -> None:
        with pytest.raises((RequestError, Refusal), match=r"takes more than 1 s|was too busy"):
            compiler.compile(bomb)
        ends.append("bomb")

    started = time.monotonic()
    thread = threading.Thread(target=explode)
    thread.start()
    compiler.compile(regex("quick[a-d]"))
    ends.append("quick")
    thread.join(20)
    assert ends == ["quick", "bomb"]
    assert MAX_SECONDS / THREADS <= time.monotonic() - started < 4 * MAX_SECONDS + 10


def test_a_grammar_that_is_slow_to_follow_ends_itself(compiler: GrammarCompiler) -> None:
    """Ambiguous repetitions compile at once and then take longer with every token."""
    grammar = compiler.compile(regex("((((a{1,100}){1,100}){1,100}){1,100}){1,100}"))
    token = ids("a")[0]
    ahead = grammar.fork()
    with pytest.raises(RequestError, match="takes too long to follow"):
        for _ in range(100):
            ahead.accept(token)
    for again in (grammar.allowed, lambda: grammar.accept(token)):
        with pytest.raises(RequestError, match="takes too long to follow"):
            again()


def test_the_process_is_started_again_when_it_is_gone(compiler: GrammarCompiler) -> None:
    process = compiler._process._forks._process
    process.kill()
    process.wait()
    assert walk(compiler.compile(regex("again")), "again")


def test_compiled_grammars_are_kept_within_a_bound(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [regex(f"kept[xyz]{{1,{number}}}") for number in range(10, 15)]
    compiler.compile(specs[0])
    kept, size = compiler._compiled[specs[0]]
    compiler.compile(specs[0])
    assert compiler._compiled[specs[0]][0] is kept
    monkeypatch.setattr(compiler, "_cache_bytes", 3 * size)
    for spec in specs:
        compiler.compile(spec)
    assert size <= compiler.num_cached_bytes <= 3 * size
    assert specs[-1] in compiler._compiled and specs[0] not in compiler._compiled
    with pytest.raises(RequestError, match="MiB when it is compiled; this server takes up to 0"):
        compiler.compile(regex("[a-z]{1,900}"))


def test_closing_does_not_wait_for_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(forks: ForkServer) -> None:
        """One that never says that it is ready."""
        if forks._is_closed:
            raise EngineError("the server is closing")
        forks._control, theirs = socket.socketpair()
        with theirs:
            forks._process = subprocess.Popen(["sleep", "60"], pass_fds=[theirs.fileno()])

    def ask() -> None:
        with pytest.raises(EngineError, match="the server is closing"):
            process.compile("regex", "{}")

    monkeypatch.setattr(ForkServer, "_start", start)
    process = CompilerProcess("{}", max_seconds=1, max_memory=1 << 30)
    thread = threading.Thread(target=ask)
    thread.start()
    started = time.monotonic()
    while not process._forks._lock.locked():
        assert time.monotonic() - started < 20, "it was never asked"
        time.sleep(0.01)
    started = time.monotonic()
    process.close()
    thread.join(10)
    assert time.monotonic() - started < 5 and not thread.is_alive()


@pytest.mark.parametrize("fails", [False, True])
def test_requests_that_ask_for_one_new_grammar_at_once_compile_it_once(
    fails: bool, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, calls, ended = regex(f"once {fails}"), [], []
    may_go, compile_it = threading.Event(), compiler._process.compile

    def slow(what: str, text: str) -> str:
        calls.append(text)
        may_go.wait(20)
        if fails:
            raise RequestError("no")
        return compile_it(what, text)

    def ask() -> None:
        try:
            ended.append(compiler.compile(spec).accept(ids("o")[0]))
        except RequestError as error:
            ended.append(str(error))

    monkeypatch.setattr(compiler._process, "compile", slow)
    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    while not calls:
        time.sleep(0.001)
    time.sleep(0.05)  # the others wait by then, or would have called as well
    may_go.set()
    for thread in threads:
        thread.join(20)
    assert len(calls) == 1 and ended == ["no" if fails else True] * 5
    assert not compiler._under_way
