"""Processes together: sums of gradients, and refusals that are printed once."""

from __future__ import annotations

import json
import subprocess

import pytest
from support import SCRIPTS

REFUSING = """
import sys
from headstart.errors import DataError
from headstart.train.parallel import joined

try:
    with joined("cpu") as (world, device):
        if str(world.rank) in {refusing!r}:
            raise DataError(f"refused by {{world.rank}}")
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
    both, first, neither = (nn.Parameter(torch.ones(2)) for _ in range(3))
    both.grad = torch.full((2,), 1.0 + world.rank)
    if world.is_main:
        first.grad = torch.full((2,), 5.0)
    world.sum_gradients([both, first, neither])
    print([None if p.grad is None else p.grad.tolist() for p in (both, first, neither)])
"""

Ranks = dict[str, list[tuple[int, str, str]]]


@pytest.fixture(scope="module")
def ranks(quick_python: str) -> Ranks:
    """Exit code and output of both processes, by what they do."""
    codes = {refusing: REFUSING.format(refusing=refusing) for refusing in ("0", "1", "01")}
    done = subprocess.run(
        [quick_python, str(SCRIPTS / "two_ranks.py")], capture_output=True, text=True,
        input=json.dumps({**codes, "summing": SUMMING}), timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: Ranks = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("refusing", "said"),
    [("0", ["refused by 0\n", ""]), ("1", ["", "refused by 1\n"]), ("01", ["refused by 0\n", ""])],
    ids=["the first", "another", "all"],
)
def test_a_refusal_is_told_once_and_without_tracebacks(
    ranks: Ranks, refusing: str, said: list[str]
) -> None:
    found = ranks[refusing]
    assert [out for _, out, _ in found] == said
    assert all("Traceback" not in err for _, _, err in found), found
    assert [code for code, _, _ in found] == [1, 1]


def test_parameters_that_no_process_trains_have_no_gradient(ranks: Ranks) -> None:
    """Zeros in its place would let the optimiser decay them."""
    assert [out for _, out, _ in ranks["summing"]] == ["[[3.0, 3.0], [5.0, 5.0], None]\n"] * 2
