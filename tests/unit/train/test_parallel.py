"""Processes together: sums of gradients, and refusals that are told once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

REFUSING = """
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

SUMMING = """
import torch
from torch import nn
from headstart.train.parallel import joined

with joined("cpu") as (world, device):
    both, first, nobody = (nn.Parameter(torch.ones(2)) for _ in range(3))
    both.grad = torch.full((2,), 1.0 + world.rank)
    if world.is_main:
        first.grad = torch.full((2,), 5.0)
    world.sum_gradients([both, first, nobody])
    print([None if p.grad is None else p.grad.tolist() for p in (both, first, nobody)])
"""


def two(script: str, *words: str) -> list[tuple[int | None, str, str]]:
    """Exit code and output of both processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *words], stdout=subprocess.PIPE,
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
    found = two(REFUSING, refusing)
    assert [out for _, out, _ in found] == said
    assert all("Traceback" not in err for _, _, err in found), found
    assert [code for code, _, _ in found] == [1, 1]


def test_parameters_that_no_process_trains_have_no_gradient() -> None:
    """Zeros in its place would let the optimiser decay them."""
    assert [out for _, out, _ in two(SUMMING)] == ["[[3.0, 3.0], [5.0, 5.0], None]\n"] * 2
