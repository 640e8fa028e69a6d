"""Memory and cores of this process, read from files as Linux writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headstart.backends.host import available_bytes, usable_cores

GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n"}


def test_memory_that_the_file_cache_holds_counts_as_available(tmp_path: Path) -> None:
    """Regression: only unused pages counted, which are few on a machine that was up for a while."""
    assert available_bytes(machine(tmp_path, MEMINFO)) == 8 * GIB


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/box/memory.max": str(3 * GIB),
            "sys/fs/cgroup/box/memory.current": str(2 * GIB),
            "sys/fs/cgroup/box/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        },
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/box\n9:memory:/host/path/not/mounted\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(3 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 2}\n",
        },
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": str(3 * GIB),
            "sys/fs/cgroup/outer/memory.current": str(2 * GIB),
            "sys/fs/cgroup/outer/memory.stat": f"inactive_file {GIB // 2}\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.current": "0\n",
        },
    ],
    ids=["version 2", "version 1", "an outer group"],
)
def test_the_limit_of_a_container_counts(files: dict[str, str], tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, {**MEMINFO, **files})) == GIB * 3 // 2


def test_a_group_without_a_limit_leaves_the_machine_s_memory(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": "7\n",
    }  # fmt: skip
    assert available_bytes(machine(tmp_path, {**MEMINFO, **files})) == 8 * GIB


def test_without_any_of_these_files_the_system_is_asked(tmp_path: Path) -> None:
    assert 0 < available_bytes(tmp_path) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_cores_are_those_of_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 8, 9})
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 8},{cpu % 8 + 8}"
        for cpu in (0, 1, 2, 3, 8, 9)
    }
    root = machine(tmp_path, siblings)
    assert usable_cores(root) == 4
    machine(root, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"})
    assert usable_cores(root) == 2
    machine(root, {"sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert usable_cores(root) == 1
