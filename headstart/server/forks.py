"""Processes for work that nothing can interrupt and that may take too much: grammars, templates.

Untrusted work runs in a process that is killed when it goes beyond its limits. `ForkServer` is
the server's side: it starts a module once (and again when it is gone), and gives it one end of a
socket for each piece of work. `fork_for_each` is that module's loop. Both end with the server: the
loop when its control socket closes, and whatever it forked when the loop's process is gone.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from headstart.errors import EngineError
from headstart.processes import python_command

_START_SECONDS = 120.0  # such a module may import torch
WAIT_FACTOR = 4  # waiting for a busy processor, as a multiple of the time that work may take
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class ForkServer:
    """A module that forks, in a process of its own; `what` it does is for messages."""

    def __init__(self, module: str, given: bytes, what: str):
        """The process reads `given` from its standard input before the first piece of work."""
        self._module, self._given, self._what = module, given, what
        self._lock = threading.Lock()
        self._is_closed = self._is_ready = False
        self._start()

    def connect(self, note: bytes = b".") -> socket.socket:
        """A socket to a new fork, which also gets the note; waits for the start if need be."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                self._hand_over(theirs, note)
        except BaseException:
            ours.close()
            raise
        return ours

    def close(self) -> None:
        self._is_closed = True
        self._process.kill()  # a thread that waits for its start holds the lock
        with self._lock:
            self._stop()

    def _hand_over(self, end: socket.socket, note: bytes) -> None:
        for _ in range(2):
            self._await_start()
            try:
                socket.send_fds(self._control, [note], [end.fileno()])
                return
            except OSError:  # the process is gone
                self._stop()
                self._start()
        raise EngineError(f"the process that {self._what} does not start; see the log.")

    def _start(self) -> None:
        if self._is_closed:
            raise EngineError(f"the server is closing, and the process that {self._what} with it.")
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                python_command(self._module, str(theirs.fileno())),
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self._is_ready = False
        # It may be megabytes and is read only after the imports: do not wait for that here.
        threading.Thread(target=self._send_given, args=(self._process,), daemon=True).start()

    def _send_given(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        try:
            with process.stdin as stream:
                stream.write(self._given)
        except (BrokenPipeError, ValueError):
            pass  # it is gone, which the next piece of work will notice

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


def fork_for_each(control: socket.socket, work: Callable[[socket.socket, bytes], None]) -> None:
    """Say that the module is ready, then do each piece of work in a fork, until the server ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the forks are not waited for
    parent = os.getpid()
    control.sendall(b"+")
    while True:
        try:
            note, fds, _, _ = socket.recv_fds(control, 256, 1)
        except OSError:
            return
        if not fds:
            return
        end = socket.socket(fileno=fds[0])
        if os.fork() == 0:
            control.close()
            try:
                _die_with(parent)
                work(end, note)
            finally:
                os._exit(0)
        end.close()


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(0)


def limit_memory(more: int) -> None:
    """At most this many bytes of address space beyond what the process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def limit_time(seconds: float, wait: float) -> None:
    """Processor time, and time by the clock, after which this process is killed; 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, wait)
