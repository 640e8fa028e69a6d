"""Triton loads what it compiled, launchers and kernels, only from a folder of the user alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

from headstart.backends.cuda.kernels.jit import jit, use_private_cache
from headstart.errors import ConfigError


def kernel() -> None:
    """Never launched."""


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the interpreter compiles nothing."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # what a test sets is taken back behind it


@pytest.mark.parametrize("variable", ["HEADSTART_CACHE", "TRITON_CACHE_DIR"])
def test_a_kernel_is_kept_where_only_the_user_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        jit(kernel)
    finally:
        os.umask(before)
    folder = Path(triton.knobs.cache.dir)
    assert folder.parent == tmp_path / "cache"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    jit(kernel)
    assert Path(triton.knobs.cache.dir) == folder, "not a folder in a folder"
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"mode 0777.*TRITON_CACHE_DIR"):
        jit(kernel)


def test_where_nothing_can_be_kept_each_process_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    use_private_cache()
    found = Path(triton.knobs.cache.dir)
    assert found.stat().st_uid == os.geteuid()
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
