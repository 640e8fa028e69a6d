"""What the learner's process asks of the system at its start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headstart.learn import process


@pytest.mark.parametrize(("taken", "asked"), [(1, [-3, -1]), (0, [-3])], ids=["taken", "refused"])
def test_freed_memory_is_kept_only_where_large_blocks_are_memory_that_can_be_kept(
    taken: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc refuses thresholds that are too large for it; M_MMAP_THRESHOLD is -3."""
    calls: list[int] = []

    def mallopt(option: int, value: int) -> int:
        calls.append(option)
        return taken

    libc = SimpleNamespace(mallopt=mallopt)
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: libc)
    process._keep_freed_memory()
    assert calls == asked
