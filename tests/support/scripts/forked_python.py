"""Python processes that begin with everything imported: forks of this one, which waits for orders.

`python forked_python.py SOCKET PROGRAM`; PROGRAM is quick_python.py, which gives orders there. Ends
when its standard input does.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from itertools import takewhile
from typing import Any, NamedTuple

# Not headstart.train: a command that has imported it speaks for its own process only.
MODULES = (
    "transformers.models.auto.tokenization_auto", "torch.distributed.run", "headstart.cli.main",
    "headstart.engine.engine", "headstart.server.lifecycle",
)  # fmt: skip
OPTIONAL = (
    "numba", "xgrammar", "torch._dynamo", "torch.distributed.fsdp", "torch.utils.tensorboard",
)  # fmt: skip
_MOST_FDS = 64
_FREE_FROM = 1000  # file descriptors that no process was given


class Order(NamedTuple):
    """What to run, and the files that it is to have open, by number."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    files: dict[int, int]


def wait_for_orders(listener: socket.socket) -> Order | None:
    """Returns an order in a new process that is to carry it out, None at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait for forks are not waited for
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        link, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _forked(link)
        link.close()


def _forked(link: socket.socket) -> Order:
    """Returns in a fork of this process; here, tells the other end how the fork ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    order = _received(link)
    child = os.fork()
    if child == 0:
        link.close()
        return order
    for number in order.files.values():
        os.close(number)
    link.sendall(struct.pack("<i", child))
    ended = os.pidfd_open(child)
    if ended not in select.select([link, ended], [], [])[0]:
        os.kill(child, signal.SIGKILL)  # the process that asked for it was killed
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        link.sendall(struct.pack("<i", code))
    finally:
        os._exit(0)


def _received(link: socket.socket) -> Order:
    head, found, _, _ = socket.recv_fds(link, 4, _MOST_FDS)
    with link.makefile("rb") as stream:
        asked: dict[str, Any] = json.loads(stream.read(*struct.unpack("<i", head)))
    files = {}
    for number, own in zip(asked.pop("files"), found, strict=True):
        files[number] = fcntl.fcntl(own, fcntl.F_DUPFD, _FREE_FROM)
        os.close(own)
    return Order(**asked, files=files)


def carry_out(order: Order) -> None:
    """Run a module or a script as Python would, in this process."""
    os.closerange(0, _FREE_FROM)
    for number, own in order.files.items():
        os.dup2(own, number)
        os.close(own)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    options = list(takewhile({"-P", "-u"}.__contains__, order.words))
    words = order.words[len(options) :]
    if "-u" in options or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    if words[0] == "-m":
        if "-P" not in options:
            sys.path.insert(0, order.folder)
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)  # or runpy warns
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    path, quick_python = sys.argv[1:]
    del sys.path[0]  # the folder of this script
    for name in MODULES:
        importlib.import_module(name)
    for name in OPTIONAL:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    sys.executable = quick_python
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        order = wait_for_orders(listener)
    if order is not None:
        carry_out(order)


if __name__ == "__main__":
    main()
