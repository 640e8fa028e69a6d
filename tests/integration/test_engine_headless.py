"""Requests that `auto` answers without a head, and what becomes of them; interpreted on the CPU."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from support.engine_runs import ids_of
from support.kernel_runs import BLOCK_BYTES, SIZES
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from headstart.engine.cost import NEVER_PAYS
from headstart.engine.device_loop import DeviceLoop
from headstart.engine.round_costs import LiveRounds, RoundTable

from headstart.backends.cuda.rounds import Kind
from headstart.engine import headless, memory, seating
from headstart.engine import parts as parts_module
from headstart.engine.engine import Engine
from headstart.engine.output import Result
from headstart.sampling.params import SamplingParams
from headstart.server.metrics.exposition import MetricsPage
from headstart.server.metrics.recorder import ServerMetrics

pytestmark = pytest.mark.usefixtures("quick_kernels")

PROMPTS = [[9, 10, 11, 12, 13], [20, 21, 22, 23, 24], [30, 31, 32, 33, 34], [40, 41, 42, 43, 44]]
# Drafts pay for one request by itself and for nobody else; rows are cheap where there are many.
COSTS = RoundTable(
    ((1, ((0, 1.0), (1, 1.05))), (2, ((0, 1.0), (1, 3.0))), (64, ((0, 1.0), (1, 3.0))))
)
CHEAP = RoundTable(((1, ((0, 1.0), (1, 1.05))),))  # the control: drafts always pay


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interpreter takes decides nothing here; the head may be four tokens behind."""
    monkeypatch.setattr(parts_module, "measure_both", lambda *_, **__: (NEVER_PAYS, None))
    monkeypatch.setattr(seating, "WINDOW", 4)
    monkeypatch.setattr(memory, "MAX_DRAFTS", 1)


@pytest.fixture
def folder(tiny: Tiny) -> Path:
    return tiny("mimo", rate=0.9, seed=1, dtype="F32", **SIZES)


def start(folder: Path, costs: RoundTable = COSTS, *, num_blocks: int = 100) -> Engine:
    """An engine that has seen a third of its drafts accepted."""
    engine = Engine(
        folder, dtype="float32", block_size=4, kernels="on", speculate="auto",
        kv_bytes=num_blocks * BLOCK_BYTES,
    )  # fmt: skip
    assert engine.policy is not None
    engine.policy.rounds = LiveRounds(costs)
    for number in range(60):
        engine.policy._overall.observe(1, int(number % 3 == 0))
    return engine


def params(count: int, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **settings)


def plain(folder: Path, counts: list[int]) -> list[list[int]]:
    engine = Engine(folder, dtype="float32", speculate=0, kv_bytes=100 * BLOCK_BYTES)
    return ids_of(engine.generate(PROMPTS[: len(counts)], [params(count) for count in counts]))


def watched(engine: Engine) -> tuple[list[Kind], list[int]]:
    """Kinds of the rounds that will run, and how many heads each read outside of them had."""
    assert isinstance(engine.loop, DeviceLoop)
    own, kinds, reads = engine.loop.seating, list[Kind](), list[int]()
    run, catch_up = own.kinds.run, own.graphs.catch_up

    def watch_run(kind: Kind) -> bool:
        kinds.append(kind)
        return run(kind)

    def watch_read(at: list[int], rows: int) -> None:
        reads.append(len(at))
        catch_up(at, rows)

    own.kinds.run = watch_run  # type: ignore[method-assign]
    own.graphs.catch_up = watch_read  # type: ignore[method-assign,assignment]
    return kinds, reads


def drafted(result: Result) -> int:
    return sum(result.stats.acceptance.drafted)


def scraped(engine: Engine) -> tuple[float | None, float | None]:
    """How many had no head and how many got one again, as a server says it."""
    metrics, labels = ServerMetrics("tiny"), {"model_name": "tiny", "engine": "0"}
    metrics.attach(engine)
    value = MetricsPage(metrics).registry.get_sample_value
    return (
        value("headstart:headless_requests_total", labels),
        value("headstart:heads_regained_total", labels),
    )


def test_where_drafts_do_not_pay_most_requests_have_no_head(folder: Path) -> None:
    engine = start(folder)
    kinds, reads = watched(engine)
    results = engine.generate(PROMPTS, params(8))
    assert ids_of(results) == plain(folder, [8] * 4)
    assert engine.stats.headless == 3, "of the first eight requests one keeps its head"
    assert {(kind.num_drafts, kind.head_rows) for kind in kinds} == {(0, 0)}
    assert reads and set(reads) == {1}, "the one head catches up by itself"
    assert engine.pool.num_used == 0


def test_where_drafts_pay_everybody_has_a_head(folder: Path) -> None:
    engine = start(folder, CHEAP)
    assert ids_of(engine.generate(PROMPTS[:2], params(4))) == plain(folder, [4] * 2)
    assert engine.stats.headless == 0


def test_whoever_says_how_much_is_drafted_has_a_head(folder: Path) -> None:
    """And drafts in the same rounds in which others have none."""
    engine = start(folder)
    results = engine.generate(PROMPTS[:3], [params(6), params(6), params(6, speculate=1)])
    assert ids_of(results) == plain(folder, [6] * 3)
    assert engine.stats.headless == 1
    assert [bool(drafted(result)) for result in results] == [True, False, True]
    assert results[2].stats.acceptance.accepted[0] > 0


def test_headless_requests_run_out_of_memory_like_others(folder: Path) -> None:
    engine = start(folder, num_blocks=11)
    results = engine.generate(PROMPTS, params(9))
    assert ids_of(results) == plain(folder, [9] * 4)
    assert engine.stats.headless and engine.stats.preemptions and not engine.pool.num_used


def test_blocks_that_no_head_has_read_serve_headless_requests_only(folder: Path) -> None:
    engine = start(folder)
    engine.generate(PROMPTS[:2], params(4))
    assert engine.stats.headless == 1
    with_head, without = PROMPTS[0] + [0], PROMPTS[1] + [0]
    assert len(engine.pool.match(with_head)) == 1
    assert not engine.pool.match(without)
    assert len(engine.pool.match(without, is_headless=True)) == 1
    engine.generate(PROMPTS[2:], params(1))  # arrivals 2 and 3
    again = engine.generate([PROMPTS[1]] * 2, [params(4), params(4, speculate=1)])
    assert [result.stats.num_cached_tokens for result in again] == [4, 0]
    assert ids_of(again) == [plain(folder, [4] * 2)[1]] * 2


def test_who_is_left_alone_gets_a_head_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headless, "_CHECK_EVERY", 2)
    monkeypatch.setattr(headless, "_WORTH", 0.5)
    engine = start(folder)
    counts = [3, 14]
    results = engine.generate(PROMPTS[:2], [params(count) for count in counts])
    assert ids_of(results) == plain(folder, counts)
    assert (engine.stats.headless, engine.stats.heads_regained) == scraped(engine) == (0, 1)
    assert drafted(results[1]) > 3, "it drafts from then on"
    assert engine.stats.preemptions == 0 and results[1].stats.num_preemptions == 0
    assert engine.pool.num_used == 0


def test_who_has_little_left_to_say_goes_on_without(folder: Path) -> None:
    engine = start(folder)
    engine.generate(PROMPTS[:2], [params(3), params(14)])
    assert (engine.stats.headless, engine.stats.heads_regained) == scraped(engine) == (1, 0)


def test_an_engine_that_is_dropped_is_gone_at_once(folder: Path) -> None:
    """Its weights must not wait for the garbage collector, which leaves them alone on a GPU."""
    engine = start(folder)
    loop = weakref.ref(engine.loop)
    gc.disable()
    try:
        del engine
        assert loop() is None
    finally:
        gc.enable()
