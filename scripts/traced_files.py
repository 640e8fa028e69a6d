"""Which files of headstart/ run while a request is answered: functions called, imports excluded.

    python scripts/traced_files.py chat MODEL [--stream] [--device cuda] [--speculate 3]
    python scripts/traced_files.py generate MODEL [--device cpu] [--speculate 3]

`chat` counts from the arrival of a chat request at a running server to its log line, in all
threads; of three equal requests, files that all three ran. The timer of the server stands still
meanwhile: it is no part of a request. `generate` counts from the loaded model to the end of the
command, and the command's own functions that are waiting for it. Ends with one JSON line.

Without a GPU the way through the GPU's kernels is counted with a small model: TRITON_INTERPRET=1
in the environment, `--device cpu --kernels on`.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import functools
import io
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import headstart

PACKAGE = Path(headstart.__file__).parent
_IMPORTING = "<frozen importlib._bootstrap>"
_TURNS = 3
MESSAGES = [{"role": "user", "content": "Hello"}]


class Tracer:
    """Notes files of the package whose functions run; sees threads that start after it only."""

    def __init__(self) -> None:
        self._is_counting = False
        self._known: dict[CodeType, str | None] = {}  # the file of the package, None for others
        self._found: set[str] = set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        threading.setprofile(self._call)
        sys.setprofile(self._call)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def begin(self) -> None:
        """Count from here on, functions of this thread that are already running included."""
        self._found, self._is_counting = set(), True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            self._note(frame)
            frame = frame.f_back

    def end(self) -> list[str]:
        """The files since `begin`, as paths inside the package."""
        self._is_counting = False
        return sorted(self._found)

    def _call(self, frame: FrameType, event: str, argument: Any) -> None:
        # A coroutine that goes on after waiting is no call: the server's own wait all the time.
        if self._is_counting and event == "call" and frame.f_lasti <= _start(frame.f_code):
            self._note(frame)

    def _note(self, frame: FrameType) -> None:
        code = frame.f_code
        if code not in self._known:
            path = Path(code.co_filename)
            is_ours = path.is_relative_to(PACKAGE) and code.co_name != "<module>"
            self._known[code] = str(path.relative_to(PACKAGE)) if is_ours else None
        file = self._known[code]
        if file is not None and file not in self._found and not _is_importing(frame):
            self._found.add(file)


@functools.cache
def _start(code: CodeType) -> int:
    """Where a function is when it has just been called; coroutines go on further behind."""
    return next(step.offset for step in dis.get_instructions(code) if step.opname == "RESUME")


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False


def chat_files(model: str, *, is_stream: bool, **settings: Any) -> list[str]:
    """Of a chat request to a server of this process, with these settings of its engine."""
    tracer = Tracer()
    body = {"messages": MESSAGES, "max_tokens": 16, "temperature": 0, "stream": is_stream}
    with tracer.installed(), _served(model, settings) as address:
        _ask(address, body)  # what the first one makes for all that follow
        found = []
        for _ in range(_TURNS):
            tracer.begin()
            _ask(address, body)
            found.append(set(tracer.end()))
    return sorted(set.intersection(*found))


@contextlib.contextmanager
def _served(model: str, settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
    from headstart.server import lifecycle
    from headstart.server.options import ServerOptions, listen
    from headstart.server.recording import configure

    configure("text", stream=io.StringIO())  # as `headstart serve` does: the line is a part
    lifecycle._WATCH_SECONDS = 1e6
    options = ServerOptions(port=0)
    with listen(options) as listener:
        serving = lifecycle.Serving(
            model, options, lambda: headstart.Engine(model, **settings), listener
        )
        thread = threading.Thread(target=serving.run)
        thread.start()
        while not serving.state.worker.is_ready and thread.is_alive():
            time.sleep(0.05)
        try:
            yield listener.getsockname()[:2]
        finally:
            serving.signal(15)
            thread.join()


def _ask(address: tuple[str, int], body: dict[str, Any]) -> None:
    connection = HTTPConnection(*address, timeout=600)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    assert answer.status == 200, said
    time.sleep(0.05)  # what is counted and logged when the last byte has gone


def generate_files(model: str, **settings: Any) -> list[str]:
    """Of `headstart generate`, once the model is loaded."""
    tracer, load = Tracer(), headstart.Engine.__init__

    def loaded(*args: Any, **options: Any) -> None:
        load(*args, **options)
        prompts = args[0].prompts
        _ = prompts.default_params(), prompts.end_ids  # read once from files, like the model
        tracer.begin()

    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    words = ["generate", model, "Hello", "--max-tokens=16", "--temperature=0", *flags]
    from headstart.cli.main import app

    quiet = contextlib.redirect_stdout(io.StringIO())
    with patch.object(headstart.Engine, "__init__", loaded), tracer.installed(), quiet:
        app(words, standalone_mode=False)
    return tracer.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("chat", "generate"))
    parser.add_argument("model")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--speculate", type=int, default=3)
    parser.add_argument("--kernels", choices=("auto", "on", "off"), default="auto")
    given = parser.parse_args()
    settings = {name: getattr(given, name) for name in ("device", "speculate", "kernels")}
    if given.what == "chat":
        files = chat_files(given.model, is_stream=given.stream, **settings)
    else:
        files = generate_files(given.model, **settings)
    packages = [file.partition("/")[0] for file in files]
    counts = {name: packages.count(name) for name in dict.fromkeys(packages)}
    print("\n".join(files))
    print(json.dumps({"files": len(files), "by_package": counts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
