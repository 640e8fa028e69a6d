"""The process in which grammars are compiled.

A grammar comes from a client, compiling cannot be interrupted, and it may take minutes or
gigabytes. So it happens in a process that is killed when it takes too much. This module makes such
processes: it imports xgrammar once, and forks for every grammar. It ends with the server, when the
other end of the control socket closes. `client.py` is the other side.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(control: socket.socket) -> None:
    import xgrammar

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the forks are not waited for
    info = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.buffer.read().decode())
    control.sendall(b"+")
    while True:
        try:
            limits, fds, _, _ = socket.recv_fds(control, 256, 1)
        except OSError:
            return
        if not fds:
            return
        job = socket.socket(fileno=fds[0])
        if os.fork() == 0:
            control.close()
            try:
                compile_one(info, job, **json.loads(limits))
            finally:
                os._exit(0)
        job.close()


def compile_one(
    info: Any, job: socket.socket, *, max_seconds: float, max_wait: float, max_memory: int
) -> None:
    """Answer with one line of JSON, then the compiled grammar, unless the other end is closed."""
    signal.setitimer(signal.ITIMER_PROF, max_seconds)  # of processor time, then it is killed
    signal.setitimer(signal.ITIMER_REAL, max_wait)
    os.nice(5)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + max_memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with job, job.makefile("rb") as stream:
        facts, compiled = _compile(info, stream.read().decode("utf-8", "surrogatepass"))
        job.sendall(json.dumps(facts).encode() + b"\n" + compiled)


def _compile(info: Any, text: str) -> tuple[dict[str, str], bytes]:
    import xgrammar

    facts, compiled = {}, b""
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)  # xgrammar warns there of what it will not enforce
        try:
            compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            compiled = compiler.compile_structural_tag(text).serialize_json().encode()
        except MemoryError:
            facts["memory"] = "none is left"
        except Exception as error:
            facts["memory" if "bad_alloc" in str(error) else "error"] = str(error)
        said.seek(0)
        facts["warnings"] = said.read(2000).decode("utf-8", "replace")
    return facts, compiled


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # torch would take its time to leave
