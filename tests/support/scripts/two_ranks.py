"""Pieces of Python as two ranks each, forked from one process, so that torch is imported once.

python two_ranks.py < {name: code}, as JSON; prints {name: [[exit code, stdout, stderr] by rank]}
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import traceback
from pathlib import Path

import headstart.train.parallel  # noqa: F401  for the ranks, before they are forked


def start(code: str, rank: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    os.environ["RANK"] = str(rank)
    for number, path in ((1, folder / f"{rank}.out"), (2, folder / f"{rank}.err")):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    code_of_exit = 0
    try:
        exec(compile(code, "<rank>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code_of_exit = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code_of_exit = 1
    sys.stdout.flush()
    os._exit(code_of_exit)  # what follows is the parent's


def run(code: str, folder: Path) -> list[tuple[int, str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ.update(place)
    children = [start(code, rank, folder) for rank in range(2)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    texts = [[(folder / f"{r}.{name}").read_text() for name in ("out", "err")] for r in range(2)]
    return [(code, out, err) for code, (out, err) in zip(codes, texts, strict=True)]


def main() -> None:
    found = {}
    for name, code in json.load(sys.stdin).items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = run(code, Path(folder))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
