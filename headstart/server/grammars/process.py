"""The process in which grammars are compiled.

A grammar comes from a client, compiling cannot be interrupted, and it may take minutes or
gigabytes. So it happens in a process that is killed when it takes too much (forks.py). This module
imports xgrammar once, and forks for every grammar. `client.py` is the other side.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import tempfile
from typing import Any

from headstart.server.forks import fork_for_each, limit_memory, limit_time

# A schema of some lines takes one thread more than a second with 50,000 tokens.
THREADS = min(8, len(os.sched_getaffinity(0)))
THREAD_BYTES = 72 << 20  # of address space: a stack, and what malloc reserves for each


def main(control: socket.socket) -> None:
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.buffer.read().decode())
    fork_for_each(control, lambda job, limits: compile_one(info, job, **json.loads(limits)))


def compile_one(
    info: Any, job: socket.socket, *, max_seconds: float, max_wait: float, max_memory: int
) -> None:
    """Answer with one line of JSON, then the compiled grammar, unless the other end is closed."""
    limit_time(max_seconds, max_wait)
    limit_memory(max_memory + THREADS * THREAD_BYTES)
    os.nice(5)
    with job, job.makefile("rb") as stream:
        facts, compiled = _compile(info, stream.read().decode("utf-8", "surrogatepass"))
        job.sendall(json.dumps(facts).encode() + b"\n" + compiled)


def _compile(info: Any, text: str) -> tuple[dict[str, str], bytes]:
    facts, compiled = {}, b""
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)  # xgrammar warns there of what it will not enforce
        try:
            compiled = _compiled(info, text).serialize_json().encode()
        except MemoryError:
            facts["memory"] = "none is left"
        except Exception as error:
            facts["memory" if "bad_alloc" in str(error) else "error"] = str(error)
        said.seek(0)
        facts["warnings"] = said.read(2000).decode("utf-8", "replace")
    return facts, compiled


def _compiled(info: Any, text: str) -> Any:
    """By several threads, or by this one where the system, or the limit of memory, gives none."""
    import xgrammar

    def run(threads: int) -> Any:
        compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)
        return compiler.compile_structural_tag(text)

    try:
        return run(THREADS)
    except Exception as error:
        if os.strerror(errno.EAGAIN) not in str(error):
            raise
    return run(1)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # torch would take its time to leave
