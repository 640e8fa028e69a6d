"""The process in which grammars are compiled.

A grammar comes from a client, compiling cannot be interrupted, and it may take minutes or
gigabytes. So it happens in a process that is killed when it takes too much (forks.py). This module
imports xgrammar once, and forks for every grammar. `client.py` is the other side.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from headstart.server.forks import fork_for_each, limit_memory, limit_time
from headstart.server.grammars.bounded_strings import with_quick_strings

# A schema of some lines takes one thread more than a second with 50,000 tokens.
THREADS = min(8, len(os.sched_getaffinity(0)))
_THREAD_BYTES = 72 << 20  # of address space: a stack, and what malloc reserves for each
_STUCK_SECONDS, _LOOK_SECONDS = 5.0, 0.5


def main(control: socket.socket) -> None:
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.buffer.read().decode())
    fork_for_each(control, lambda job, limits: compile_one(info, job, **json.loads(limits)))


def compile_one(
    info: Any, job: socket.socket, *, max_seconds: float, max_wait: float, max_memory: int,
    threads: int,
) -> None:  # fmt: skip
    """Answer with one line of JSON, then the compiled grammar, unless the other end is closed."""
    limit_time(max_seconds, max_wait)
    with job, job.makefile("rb") as stream:
        text = stream.read().decode("utf-8", "surrogatepass")
        threads, done = available_threads(threads), threading.Event()
        # While there is memory for it.
        threading.Thread(target=_end_if_stuck, args=[done], daemon=True).start()
        limit_memory(max_memory + (threads * _THREAD_BYTES if threads > 1 else 0))
        os.nice(5)
        facts, compiled = _compile(info, text, threads)
        done.set()
        job.sendall(json.dumps(facts).encode() + b"\n" + compiled)


def _compile(info: Any, text: str, threads: int) -> tuple[dict[str, str], bytes]:
    import xgrammar

    facts, compiled = {}, b""
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)  # xgrammar warns there of what it will not enforce
        try:
            compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)
            found = compiler.compile_structural_tag(rewritten(xgrammar, text))
            compiled = found.serialize_json().encode()
        except MemoryError:
            facts["memory"] = "none is left"
        except Exception as error:
            facts["memory" if "bad_alloc" in str(error) else "error"] = str(error)
        said.seek(0)
        facts["warnings"] = said.read(2000).decode("utf-8", "replace")
    return facts, compiled


def rewritten(xgrammar: Any, text: str) -> str:
    """A structural tag whose masks are quicker; as it is where xgrammar would refuse it."""

    def schema_text(schema: Any, spaces: int) -> str:
        return str(xgrammar.Grammar.from_json_schema(json.dumps(schema), max_whitespace_cnt=spaces))

    def is_parsed(grammar: str) -> bool:
        return str(xgrammar.Grammar.from_ebnf(grammar)) == grammar

    try:
        return json.dumps(with_quick_strings(json.loads(text), schema_text, is_parsed))
    except (RuntimeError, ValueError):
        return text


def available_threads(wanted: int) -> int:
    """So many, or one: xgrammar waits for ever where the system gives it only some of them."""
    done, made = threading.Event(), []
    try:
        for _ in range(wanted if wanted > 1 else 0):
            one = threading.Thread(target=done.wait, daemon=True)
            one.start()
            made.append(one)
    except RuntimeError:  # no more can be had
        return 1
    finally:
        done.set()
        for one in made:
            one.join()
    return wanted


def _end_if_stuck(done: threading.Event) -> None:
    """End the process where nothing computes: a thread could not be made, for want of memory."""
    since = time.monotonic()
    while not done.wait(_LOOK_SECONDS):
        if _computes():
            since = time.monotonic()
        elif time.monotonic() - since > _STUCK_SECONDS:
            os._exit(1)


def _computes() -> bool:
    """Whether another thread of this process runs, or waits for a processor of a busy machine."""
    own = str(threading.get_native_id())
    with suppress(OSError, MemoryError):  # a thread has just ended; or there is hardly any left
        for thread in Path("/proc/self/task").iterdir():
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            if state in "RD" and thread.name != own:
                return True
    return False


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # torch would take its time to leave
