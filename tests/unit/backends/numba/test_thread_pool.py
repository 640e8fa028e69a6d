"""Kernels called by several threads."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
import torch

pytest.importorskip("numba")

from headstart.backends.numba.thread_pool import (
    POOL,
    ThreadPool,
    claim_tiles,
    new_counters,
)


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_a_signal_inside_a_kernel_is_what_its_handler_raised(raised: BaseException) -> None:
    """Every call from C that a signal interrupts ends with a SystemError, one inside the other."""

    def kernel() -> None:
        inner = SystemError("<function _numba_unpickle> returned a result with an exception set")
        inner.__cause__ = raised
        raise SystemError("returned a result with an exception set") from inner

    with pytest.raises(type(raised)) as found:
        POOL.run(0, kernel)
    assert found.value is raised


def test_other_errors_of_the_interpreter_stay_as_they_are() -> None:
    def kernel() -> None:
        raise SystemError("bad call") from ValueError("odd")

    with pytest.raises(SystemError, match="bad call"):
        POOL.run(0, kernel)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("tiles", [1, 5, 18, 96, 1536])
def test_stretches_cover_all_tiles_once(
    monkeypatch: pytest.MonkeyPatch, threads: int, tiles: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    counters, found = new_counters(2), []
    while (stretch := claim_tiles(counters, 1, tiles))[0] < tiles:
        found.append(range(*stretch))
    assert [tile for stretch in found for tile in stretch] == list(range(tiles))
    assert len(found) >= min(tiles, 3 * threads)
    assert max(map(len, found)) <= 16


def test_stopped_helpers_have_done_their_work_and_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process ends so: a helper inside compiled code would abort it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    pool, calls = ThreadPool(), SimpleQueue[int]()
    for num_calls in (3, 6):
        before = threading.active_count()
        pool.run(1 << 30, lambda: calls.put(1))
        pool.stop()
        assert calls.qsize() == num_calls
        assert threading.active_count() == before
