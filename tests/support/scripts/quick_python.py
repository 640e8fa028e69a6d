"""Stands in for Python: has forked_python.py run the same words, with our files, and ends alike.

Only modules and scripts are run there: for other words it becomes the real Python.
"""

import json
import os
import signal
import socket
import struct
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def main() -> None:
    words = [word for word in sys.argv[1:] if word not in ("-P", "-u")] or ["-"]
    if words[0].startswith("-") and words[0] != "-m":
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is a process to tell
    files = [number for number in range(64) if is_open(number)]
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(os.environ["HEADSTART_TEST_FORKS"])
        order = {
            "words": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ),
            "files": files,
        }  # fmt: skip
        data = json.dumps(order).encode()
        socket.send_fds(link, [struct.pack("<i", len(data))], files)
        link.sendall(data)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in files:  # else what reads them would never see their end
            os.dup2(nothing, number)
        (pid,) = struct.unpack("<i", link.recv(4))
        note_down(pid)
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        (code,) = struct.unpack("<i", link.recv(4))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def note_down(pid: int) -> None:
    """For tests that look at the process which does the work."""
    folder = os.path.dirname(os.environ["HEADSTART_TEST_FORKS"])
    with open(os.path.join(folder, str(os.getpid())), "w") as file:
        file.write(str(pid))


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


main()
