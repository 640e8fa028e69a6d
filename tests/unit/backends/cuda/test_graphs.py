"""For how many requests rounds are captured, and when one is a replay."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headstart.backends.cuda import graphs as graphs_module
from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.graphs import Graphs
from headstart.backends.cuda.kernels.squeezed import lanes_for
from headstart.backends.cuda.round_profile import _timed_sizes
from headstart.backends.cuda.sampling import SamplingNeeds
from headstart.backends.cuda.shapes import ChoiceShape, DraftShape, RoundShape, TrunkShape
from headstart.engine.memory import MOST_REQUESTS


def graphs_for(count: int) -> Graphs:
    batch = DecodeBatch(
        count, max_drafts=1, window=2, max_blocks=1, hidden=1, vocab=1, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    return Graphs(None, batch)


@pytest.mark.parametrize(
    ("count", "last"), [(3, [1, 2, 3]), (100, [80, 96, 100]), (300, [192, 256, 300])]
)
def test_every_number_of_requests_has_a_captured_size(count: int, last: list[int]) -> None:
    graphs = graphs_for(count)
    assert graphs.sizes()[-3:] == last
    assert {graphs.bucket(number) for number in range(1, count + 1)} == set(graphs.sizes())


def test_a_gpu_runs_no_more_requests_by_itself_than_the_largest_captured_round_has() -> None:
    assert graphs_for(MOST_REQUESTS + 1).sizes()[-2] == MOST_REQUESTS


@pytest.mark.parametrize("count", [1, 4, 7, 40, 100, MOST_REQUESTS])
def test_kernels_of_rounds_that_copy_are_compiled_at_the_start_for_every_number_of_requests(
    count: int,
) -> None:
    """Regression: eight requests that copied had to wait for a compiler."""
    graphs = graphs_for(count)
    rounds: Any = SimpleNamespace(bucket=graphs.bucket, sizes=SimpleNamespace(max_requests=count))
    compiled = {lanes_for(size) for size in _timed_sizes(rounds)}
    assert {lanes_for(size) for size in graphs.sizes()} == compiled
    assert all(size <= lanes_for(size) <= 4 * size for size in graphs.sizes())


def test_only_replays_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round of a shape compiles, the second captures; both count as new."""
    ran: list[Any] = []
    for part in ("run_drafts", "run_trunk", "run_choice"):
        monkeypatch.setattr(graphs_module, part, lambda model, batch, shape: ran.append(shape))
    graphs, shape = graphs_for(8), RoundShape(5, 1, 2)
    assert [graphs.run(shape) for _ in range(4)] == [False, False, True, True]
    as_captured = RoundShape(6, 1, 2)
    assert set(ran) == {as_captured.drafts, as_captured.trunk, as_captured.choice}
    assert set(graphs.new_seconds) == {as_captured}
    assert graphs.is_captured(as_captured) and not graphs.is_captured(RoundShape(6, 0, 0))


def test_settings_of_requests_share_what_does_not_depend_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[Any] = []
    for part in ("run_drafts", "run_trunk", "run_choice"):
        monkeypatch.setattr(graphs_module, part, lambda model, batch, shape: ran.append(shape))
    graphs, plain = graphs_for(8), RoundShape(6, 1, 2)
    for needs in (SamplingNeeds(), SamplingNeeds(processes=True), SamplingNeeds(has_logprobs=True)):
        graphs.run(replace(plain, needs=needs))
    assert len({part for part in ran if isinstance(part, TrunkShape)}) == 1
    assert len({part for part in ran if isinstance(part, DraftShape)}) == 1
    assert len({part for part in ran if isinstance(part, ChoiceShape)}) == 3


def test_of_very_many_graphs_those_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "_MOST_GRAPHS", 2)
    graphs, parts = graphs_for(8), [TrunkShape(count, 1) for count in (1, 2, 3)]
    for part in parts:
        graphs._forget_oldest()
        graphs._graphs[part], graphs._runs[part] = object(), 5
    assert list(graphs._graphs) == parts[1:]
    assert graphs._runs == {parts[0]: 1, parts[1]: 5, parts[2]: 5}, "captured again next time"


def test_without_memory_for_a_graph_its_part_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, part, ran = graphs_for(8), TrunkShape(4, 1), []

    def capture(part: TrunkShape) -> Any:
        ran.append("captured")
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(graphs, "_capture", capture)
    monkeypatch.setattr(graphs, "_launch", lambda part: ran.append("launched"))
    monkeypatch.setattr(graphs, "_batch", SimpleNamespace(lengths=SimpleNamespace(is_cuda=True)))
    for _ in range(4):
        graphs.run_part(part)
    assert ran == ["launched", "captured", "launched", "launched", "launched"]
    assert not graphs.is_captured(RoundShape(4, 1, 2)), "its time is not that of a replay"


def test_packed_passes_take_a_larger_graph_for_a_while() -> None:
    graphs, trunk = graphs_for(8), TrunkShape(3, 1)
    assert graphs.packed_shape(trunk, 6 + 67, 3) == TrunkShape(4, 1, 4, 76)
    assert graphs.packed_shape(trunk, 6 + 290, 10) == TrunkShape(4, 1, 16, 296)
    near, far = TrunkShape(4, 1, 16, 320), TrunkShape(4, 1, 16, 400)
    graphs._graphs[near] = graphs._graphs[far] = object()
    assert graphs.packed_shape(trunk, 296, 10) == near
    assert graphs.packed_shape(trunk, 296, 17).groups == 32, "it has fewer groups"
    assert graphs.packed_shape(trunk, 240, 10).rows == 240, "it has far more rows"
    assert graphs.counts() == [0, 1, 2, 4, 8]
    graphs.prepare(TrunkShape(4, 1, 1, 60))
    assert graphs._runs[TrunkShape(4, 1, 1, 60)] == 2, "the next run replays"
    found = [graphs.packed_shape(trunk, 296, 10).rows for _ in range(32)]
    assert found == [*[320] * 30, *[296] * 2], "wanted often enough"
    assert graphs.packed_shape(TrunkShape(0, 0), 5, 1) == TrunkShape(0, 0, 1, 8), "prompts alone"
