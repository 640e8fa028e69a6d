"""The process in which chat templates run.

A template comes with the model and its input from clients. It may loop, or ask for a number of
gigabytes in one operation, which no other thread could interrupt. So it runs in a process that is
killed when it takes too much (forks.py). This module imports the renderer once; a fork renders for
one request after another. The template is compiled by the forks, within the limits: jinja computes
constant expressions while it compiles. `client.py` is the other side.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from headstart.server.forks import fork_for_each, limit_memory, limit_time

ASKED = struct.Struct("<Qdd?")  # bytes of JSON, seconds of a processor and of waiting, is_patient
ANSWERED = struct.Struct("<cQ")  # what follows, and its bytes
TEXT, REFUSED, LARGE = b"+", b"-", b">"
MAX_BYTES = 64 << 20  # of a rendered text; far more than any model reads
_MAX_MEMORY = 1 << 30
_LONGEST_ERROR = 2000

Render = Callable[..., tuple[list[str], Any]]


def main(control: socket.socket) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    names: dict[str, str] = json.loads(sys.stdin.buffer.read())
    fork_for_each(control, lambda end, note: _work(end, render_jinja_template, names))


def _work(end: socket.socket, render: Render, names: dict[str, str]) -> None:
    """Render until the other end closes, a limit ends this process, or it was asked patiently."""
    limit_memory(_MAX_MEMORY)
    is_patient, template = False, ""
    with end, end.makefile("rb") as stream:
        while not is_patient and len(head := stream.read(ASKED.size)) == ASKED.size:
            size, seconds, wait, is_patient = ASKED.unpack(head)
            if is_patient:  # what is known to be slow takes only what others leave
                os.nice(19)
            job = json.loads(stream.read(size))
            template = job.pop("template") or template  # sent only where it changes
            limit_time(seconds, wait)
            kind, data = _rendered(render, names, template, **job)
            limit_time(0, 0)
            end.sendall(ANSWERED.pack(kind, len(data)) + data)


def _rendered(
    render: Render, names: dict[str, str], template: str, messages: list[Any],
    options: dict[str, Any],
) -> tuple[bytes, bytes]:  # fmt: skip
    try:
        texts, _ = render([messages], chat_template=template, **{**names, **options})
        data = texts[0].encode("utf-8", "surrogatepass")
    except MemoryError:
        return LARGE, b""
    except Exception as error:  # a template is a program: it may raise anything
        said = str(error) or type(error).__name__
        return REFUSED, said[:_LONGEST_ERROR].encode("utf-8", "replace")
    return (TEXT, data) if len(data) <= MAX_BYTES else (LARGE, b"")


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
