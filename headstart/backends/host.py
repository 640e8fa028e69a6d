"""What this process may use of its machine: memory and cores, limits of its container included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED = 1 << 60  # version 1 writes a number near 2^63 for no limit


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that can be taken without swapping or being killed."""
    free = _mem_available(root)
    if free is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([free, *_group_rooms(root)]))


def usable_cores(root: Path = _ROOT) -> int:
    """Cores by affinity and CPU quota, hyperthreads of one core counted once; at least 1."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    cores = {_core(root, cpu) for cpu in allowed}
    count = len(cores) or os.cpu_count() or 1
    quotas = [quota for folder in _groups(root, "cpu") if (quota := _quota(folder)) is not None]
    return max(1, min([count, *(int(quota) for quota in quotas)]))


def _mem_available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group_rooms(root: Path) -> Iterator[int]:
    """What each control group above this process still allows; file cache can be given back."""
    for folder in _groups(root, "memory"):
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is None or used is None or limit >= _UNLIMITED:
                continue
            stat = dict(line.split()[:2] for line in _lines(folder / "memory.stat") if " " in line)
            yield limit - used + min(used, int(stat.get(cache_name, 0)))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control groups, from its own up; version 2, then version 1."""
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if names else "")
        folder = top / path.lstrip("/")
        # Inside a container the path may be the host's, which is not mounted: the top is ours then.
        for part in [folder, *folder.parents]:
            if part.is_relative_to(top) and part.is_dir():
                yield part


def _quota(folder: Path) -> float | None:
    """CPUs that a control group may use, None without a limit."""
    words = " ".join(_lines(folder / "cpu.max")).split()
    if len(words) == 2 and words[0] != "max":
        return int(words[0]) / int(words[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _core(root: Path, cpu: int) -> str:
    siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return next(iter(_lines(siblings)), str(cpu))


def _number(path: Path) -> int | None:
    text = next(iter(_lines(path)), "")
    return int(text) if text.lstrip("-").isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
