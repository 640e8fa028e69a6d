"""Compiled kernels are loaded only from a folder that no other user can write."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from headstart.checkpoint.cache import make_private
from headstart.errors import ConfigError


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("no_umask")
def test_folders_are_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "too" / "kernels"
    assert make_private(folder)
    assert [mode(path) for path in (folder, folder.parent, folder.parent.parent)] == [0o700] * 3
    assert make_private(folder)


@pytest.mark.parametrize("open_to", [0o777, 0o770, 0o755])
def test_a_folder_that_others_may_open_is_refused(tmp_path: Path, open_to: int) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(open_to)
    with pytest.raises(ConfigError, match=rf"kernels has mode {open_to:04o}, not 0700.*Remove it"):
        make_private(folder)


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, own = tmp_path / "kernels", os.geteuid()
    assert make_private(folder)
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {own}, not to {own + 1}"):
        make_private(folder)


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "kernels").symlink_to(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="kernels is a link"):
        make_private(tmp_path / "kernels")


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not make_private(tmp_path / "file" / "kernels")


@pytest.mark.usefixtures("no_umask")
@pytest.mark.parametrize("variable", ["HEADSTART_CACHE", "NUMBA_CACHE_DIR"])
def test_cpu_kernels_are_not_loaded_from_a_folder_open_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    pytest.importorskip("numba")
    from headstart.backends.numba.compiler import kept_in, njit

    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "cache"))
    njit()(test_a_link_is_refused)
    assert kept_in().parent == tmp_path / "cache"
    assert mode(kept_in()) == 0o700
    kept_in().chmod(0o777)
    with pytest.raises(ConfigError, match=r"mode 0777.*HEADSTART_CACHE"):
        njit()(test_a_link_is_refused)
