"""Processes that leave a run: one says why, the others go quietly."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from headstart.errors import DataError
from headstart.train.parallel import joined

try:
    with joined("cpu") as (world, device):
        if str(world.rank) in sys.argv[1]:
            raise DataError(f"refused by {world.rank}")
        world.wait()
except DataError as error:
    print(error)
    sys.exit(1)
"""


def two(refusing: str) -> list[tuple[int | None, str, str]]:
    """Exit code and output of both processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, refusing], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env={**os.environ, **place, "RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [process.communicate(timeout=60) for process in processes]
    return [(p.returncode, *t) for p, t in zip(processes, told, strict=True)]


@pytest.mark.parametrize(
    ("refusing", "said"),
    [("0", ["refused by 0\n", ""]), ("1", ["", "refused by 1\n"]), ("01", ["refused by 0\n", ""])],
    ids=["the first", "another", "all"],
)
def test_a_refusal_is_told_once_and_without_tracebacks(refusing: str, said: list[str]) -> None:
    found = two(refusing)
    assert [out for _, out, _ in found] == said
    assert all("Traceback" not in err for _, _, err in found), found
    assert [code for code, _, _ in found] == [1, 1]
