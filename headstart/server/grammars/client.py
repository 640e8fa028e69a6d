"""The server's side of process.py: sends a grammar, waits a limited time, checks the result."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
import time

from headstart.errors import EngineError, RequestError
from headstart.processes import python_command
from headstart.server.refusals import unavailable

_START_SECONDS = 120.0  # importing xgrammar brings torch along
_AT_ONCE = 4  # grammars side by side: a slow one must not keep the others waiting
_WAIT_FACTOR = 4  # waiting for a busy processor, as a multiple of the time that compiling may take


class CompilerProcess:
    """Compiles grammars in another process, which is started again when it is gone."""

    def __init__(self, tokenizer_info: str, *, max_seconds: float, max_memory: int):
        self._info = tokenizer_info.encode()
        self._max_seconds, self._max_memory = max_seconds, max_memory
        self._max_wait = _WAIT_FACTOR * max_seconds
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        self._lock = threading.Lock()
        self._is_closed = self._is_ready = False
        self._start()

    def compile(self, what: str, text: str) -> str:
        """The compiled grammar, as xgrammar writes it; RequestError says why there is none."""
        if not self._places.acquire(timeout=self._max_wait):
            raise unavailable(
                "too many grammars are being compiled; try again later.", code="grammars_busy"
            )
        try:
            facts, compiled, seconds = self._ask(text)
        finally:
            self._places.release()
        if not facts and seconds >= self._max_seconds:
            raise RequestError(
                f"the {what} takes more than {self._max_seconds:g} s to compile. Make it simpler: "
                "fewer repetitions, fewer levels."
            )
        _check(what, facts, self._max_memory)
        return compiled.decode()

    def close(self) -> None:
        self._is_closed = True
        self._process.kill()  # a thread that waits for its start holds the lock
        with self._lock:
            self._stop()

    def _ask(self, text: str) -> tuple[dict[str, str], bytes, float]:
        """What the process says (nothing where it was killed), its result, and seconds."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                self._hand_over(theirs)
            started = time.monotonic()
            try:
                ours.settimeout(self._max_wait)
                ours.sendall(text.encode("utf-8", "surrogatepass"))
                ours.shutdown(socket.SHUT_WR)
                head, compiled = _read(ours, started + self._max_wait)
            except OSError:  # no time is left, or the process is gone
                head, compiled = b"", b""
        return json.loads(head or b"{}"), compiled, time.monotonic() - started

    def _hand_over(self, job: socket.socket) -> None:
        limits = json.dumps(
            {
                "max_seconds": self._max_seconds, "max_wait": self._max_wait,
                "max_memory": self._max_memory,
            }
        ).encode()  # fmt: skip
        for _ in range(2):
            self._await_start()
            try:
                socket.send_fds(self._control, [limits], [job.fileno()])
                return
            except OSError:  # the process is gone
                self._stop()
                self._start()
        raise EngineError("the process that compiles grammars does not start; see the log.")

    def _start(self) -> None:
        if self._is_closed:
            raise EngineError("the server is closing and compiles no grammars.")
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                python_command("headstart.server.grammars.process", str(theirs.fileno())),
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self._is_ready = False
        # The tokens are megabytes and are read only after the import: do not wait for that here.
        threading.Thread(target=self._send_tokens, args=(self._process,), daemon=True).start()

    def _send_tokens(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        try:
            with process.stdin as stream:
                stream.write(self._info)
        except (BrokenPipeError, ValueError):
            pass  # it is gone, which the next grammar will notice

    def _await_start(self) -> None:
        if self._is_ready:
            return
        self._control.settimeout(_START_SECONDS)
        try:
            self._is_ready = self._control.recv(1) == b"+"
        except OSError:
            self._is_ready = False

    def _stop(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


def _read(stream: socket.socket, deadline: float) -> tuple[bytes, bytes]:
    """All that comes up to the end: the first line, and the rest."""
    parts = []
    while part := stream.recv(1 << 20):
        parts.append(part)
        stream.settimeout(max(0.001, deadline - time.monotonic()))
    head, _, rest = b"".join(parts).partition(b"\n")
    return head, rest


def _check(what: str, facts: dict[str, str], max_memory: int) -> None:
    if not facts:
        raise RequestError(
            f"the {what} cannot be compiled: the compiler broke down. Make it smaller or simpler."
        )
    if "memory" in facts:
        raise RequestError(
            f"the {what} needs more than {max_memory >> 20} MiB to compile. Make it smaller."
        )
    if "error" in facts:
        raise RequestError(f"the {what} cannot be used: {_sentence(facts['error'])}.")
    if "Warning" in facts["warnings"]:
        raise RequestError(
            f"the {what} asks for something that cannot be enforced: "
            f"{_sentence(facts['warnings'])}. Say it in another way."
        )


def _sentence(said: str) -> str:
    """The first thing that xgrammar said, without time and place in its source."""
    line = next((line for line in said.splitlines() if line.strip()), "no reason given")
    line = re.sub(r"\[[\d:]+\] \S+:\d+: ", "", line)
    line = re.sub(r"^(Warning|Error): |Check failed: \(.*?\) is false: ", "", line)
    return line.strip().rstrip(".")[:300]
