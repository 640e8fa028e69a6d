"""For how many requests rounds are captured, and when one is a replay."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headstart.backends.cuda import graphs as graphs_module
from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.graphs import Graphs
from headstart.backends.cuda.rounds import RoundShape


def graphs_for(count: int) -> Graphs:
    batch = DecodeBatch(
        count, max_drafts=1, window=2, max_blocks=1, hidden=1, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    return Graphs(None, batch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "last"), [(3, [1, 2, 3]), (100, [80, 96, 100]), (300, [192, 256, 300])]
)
def test_every_number_of_requests_has_a_captured_size(count: int, last: list[int]) -> None:
    graphs = graphs_for(count)
    assert graphs.sizes()[-3:] == last
    assert {graphs.bucket(number) for number in range(1, count + 1)} == set(graphs.sizes())


def test_only_replays_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round of a shape compiles, the second captures; both count as new."""
    ran: list[RoundShape] = []
    monkeypatch.setattr(graphs_module, "run_round", lambda model, batch, shape: ran.append(shape))
    graphs, shape = graphs_for(8), RoundShape(5, 1, 2)
    assert [graphs.run(shape) for _ in range(4)] == [False, False, True, True]
    as_captured = RoundShape(6, 1, 2)
    assert set(ran) == {as_captured} == set(graphs.new_seconds)
    assert graphs.is_captured(as_captured) and not graphs.is_captured(RoundShape(6, 0, 0))
