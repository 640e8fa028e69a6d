"""Real small and read-only file systems, in a mount namespace of our own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CAN_MOUNT = shutil.which("unshare") is not None and (
    subprocess.run(
        ["unshare", "-rm", "sh", "-c", "mount -t tmpfs none /mnt"], capture_output=True
    ).returncode
    == 0
)
pytestmark = pytest.mark.skipif(
    not CAN_MOUNT, reason="mounting needs user namespaces, which this machine does not allow"
)


def export_onto(disk: Path, options: str, model: Path) -> tuple[int, str, str]:
    """Exit code and stderr of an export onto a fresh tmpfs, and what it left there."""
    script = (
        f'mount -t tmpfs -o "{options}" none "$0" && '
        '{ "$1" -m headstart export "$2" --out "$0/out"; echo "$? $(ls -A "$0")"; }'
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, str(disk), sys.executable, str(model)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    code, _, left = done.stdout.strip().splitlines()[-1].partition(" ")
    return int(code), done.stderr, left


def one_line(stderr: str) -> str:
    (line,) = stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_a_disk_too_small_is_refused_before_the_copy(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    code, stderr, left = export_onto(tmp_path, "size=1m", tiny("deepseek_v3"))
    assert (code, left) == (1, "")
    assert "needs 0.002 GB and its disk has 0.001 GB free" in one_line(stderr)


def test_a_disk_that_fills_up_midway_is_one_clear_line(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    code, stderr, left = export_onto(tmp_path, "size=9m,nr_inodes=5", tiny("deepseek_v3"))
    assert (code, left) == (1, "")
    assert "no space left on the disk of" in one_line(stderr)
    assert "Free some space or choose another --out" in stderr


def test_a_read_only_disk_is_one_clear_line(tiny: Callable[..., Path], tmp_path: Path) -> None:
    code, stderr, left = export_onto(tmp_path, "ro", tiny("deepseek_v3"))
    assert (code, left) == (1, "")
    assert "Read-only file system" in one_line(stderr)


def test_copying_onto_another_file_system_works(tiny: Callable[..., Path], tmp_path: Path) -> None:
    code, stderr, left = export_onto(tmp_path, "size=9m", tiny("deepseek_v3"))
    assert (code, left) == (0, "out"), stderr
