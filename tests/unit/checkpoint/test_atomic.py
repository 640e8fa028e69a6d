from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.checkpoint_files import leftovers

from headstart.checkpoint import atomic
from headstart.checkpoint.atomic import building, check_target
from headstart.checkpoint.provenance import PROVENANCE_NAME
from headstart.errors import CheckpointError, WriteFailed


def build(out: Path, content: str = "new", *, overwrite: bool = False) -> None:
    with building(out, overwrite=overwrite) as folder:
        (folder / "headstart.json").write_text(content)


def content(out: Path) -> str:
    return (out / "headstart.json").read_text()


def test_the_folder_appears_at_the_end_only(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with building(out) as folder:
        (folder / "x").write_text("x")
        assert not out.exists()
        assert folder.parent == out.parent
    assert (out / "x").is_file()
    assert leftovers(out.parent) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_any_failure_removes_what_was_built(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), building(tmp_path / "out") as folder:
        (folder / "x").write_text("x")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_an_existing_target_needs_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"out exists. Choose another folder, or add --overw"):
        check_target(tmp_path / "out", overwrite=False)
    check_target(tmp_path / "out", overwrite=True)


def test_only_what_headstart_wrote_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"was not written by Headstart.*Remove it yourself"):
        check_target(out, overwrite=True)
    with pytest.raises(CheckpointError, match=r"out exists\. Choose another folder\.$"):
        check_target(out, overwrite=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(CheckpointError, match="out is a file; the result is a folder"):
        check_target(tmp_path / "out", overwrite=overwrite)


def test_nothing_is_replaced_through_a_link(tmp_path: Path) -> None:
    build(tmp_path / "real")
    (tmp_path / "out").symlink_to(tmp_path / "real")
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        check_target(tmp_path / "out", overwrite=True)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="loop is a symbolic link"):
        check_target(tmp_path / "loop", overwrite=False)


@pytest.mark.parametrize("place", ["model", "model/inside", ".", "link", "link/inside"])
def test_results_never_go_into_around_or_over_their_source(tmp_path: Path, place: str) -> None:
    build(tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with pytest.raises(CheckpointError, match="overlaps the input"):
        check_target(tmp_path / place, overwrite=True, inputs=(tmp_path / "model",))


def test_a_name_that_begins_like_the_source_is_another_folder(tmp_path: Path) -> None:
    build(tmp_path / "model")
    check_target(tmp_path / "model-2", overwrite=False, inputs=(tmp_path / "model",))


def test_overwrite_replaces_the_whole_folder(tmp_path: Path) -> None:
    build(tmp_path / "out", "old")
    (tmp_path / "out" / "extra").write_text("")
    build(tmp_path / "out", overwrite=True)
    assert content(tmp_path / "out") == "new"
    assert os.listdir(tmp_path / "out") == ["headstart.json"]
    assert leftovers(tmp_path) == []


def test_overwrite_works_where_names_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_renamed", lambda *_: False)
    build(tmp_path / "out", "old")
    build(tmp_path / "out", overwrite=True)
    assert content(tmp_path / "out") == "new"
    assert leftovers(tmp_path) == []


def test_a_failed_replacement_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "out", "old")
    real, calls = os.rename, []

    def rename(old: Path, new: Path) -> None:
        calls.append(new)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        real(old, new)

    monkeypatch.setattr(atomic, "_renamed", lambda *_: False)
    monkeypatch.setattr(atomic.os, "rename", rename)
    with pytest.raises(WriteFailed, match="Input/output error"):
        build(tmp_path / "out", overwrite=True)
    assert content(tmp_path / "out") == "old"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("overwrite", [False, True], ids=["plain", "overwrite"])
def test_a_folder_that_appeared_meanwhile_is_not_replaced(tmp_path: Path, overwrite: bool) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError), building(out, overwrite=overwrite):
        out.mkdir()
        (out / "thesis.txt").write_text("")
    assert os.listdir(out) == ["thesis.txt"]
    assert leftovers(tmp_path) == []


def test_an_abandoned_folder_is_cleared_away(tmp_path: Path) -> None:
    stale = tmp_path / ".out.partial-0123abcd"
    stale.mkdir()
    (stale / "big.safetensors").write_text("")
    build(tmp_path / "out")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "name", [".out.partial-notours", ".out2.partial-0123abcd", ".out.partial-0123abcd.partial-1"]
)
def test_folders_of_others_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    build(tmp_path / "out")
    assert (tmp_path / name).is_dir()


def test_links_and_files_with_such_a_name_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / ".out.partial-00000001").symlink_to(tmp_path / "precious")
    (tmp_path / ".out.partial-00000002").write_text("")
    build(tmp_path / "out")
    assert (tmp_path / "precious").is_dir()
    assert len(leftovers(tmp_path)) == 2


def test_a_name_with_wildcards_is_taken_literally(tmp_path: Path) -> None:
    (tmp_path / ".oxt.partial-0123abcd").mkdir()
    build(tmp_path / "o?t[a]*")
    assert leftovers(tmp_path) == [".oxt.partial-0123abcd"]


def test_a_second_run_on_the_same_target_is_refused(tmp_path: Path) -> None:
    with building(tmp_path / "out") as folder:
        with pytest.raises(CheckpointError, match=r"another run is writing .*Wait for it to end"):
            build(tmp_path / "out")
        assert folder.is_dir()
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("module, name", [(os, "open"), (fcntl, "flock")], ids=["open", "lock"])
def test_a_folder_taken_for_abandoned_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    """Another run may clear the new folder between its making and its locking."""
    real, cleared = getattr(module, name), []

    def late(*given: Any, **more: Any) -> Any:
        if not cleared and (found := leftovers(tmp_path)):
            cleared.extend(found)
            os.rmdir(tmp_path / found[0])
        return real(*given, **more)

    monkeypatch.setattr(module, name, late)
    build(tmp_path / "out")
    assert cleared and content(tmp_path / "out") == "new"


def test_the_current_folder_can_be_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "out", "old")
    monkeypatch.chdir(tmp_path / "out")
    build(Path("."), overwrite=True)
    assert content(tmp_path / "out") == "new"


def test_a_parent_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "out", tmp_path / "file" / "more" / "out"):
        with pytest.raises(CheckpointError, match=r"file is not a folder: choose another --out"):
            check_target(out, overwrite=True)
        with pytest.raises(WriteFailed, match=r"cannot write .*Nothing was kept"):
            build(out)
    with pytest.raises(CheckpointError, match="/ exists"):
        check_target(Path("/"), overwrite=False)
    with pytest.raises(WriteFailed, match="File name too long"):
        build(tmp_path / ("x" * 300))


def test_the_result_respects_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        build(tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def test_what_another_run_clears_at_the_same_time_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: of several runs that replaced one folder, some failed on vanished files."""
    left, removed = tmp_path / ".out.partial-00000001", []
    left.mkdir()

    def twice(folder: Path, **options: bool) -> None:
        rmtree(folder, ignore_errors=True)  # the other run was quicker
        removed.append(folder)
        rmtree(folder, **options)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", twice)
    build(tmp_path / "out", overwrite=True)
    assert left in removed and list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_folder_that_appears_meanwhile_is_replaced_where_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(old: Path, new: Path, flags: int) -> bool:
        if not new.exists():
            new.mkdir()
            (new / "headstart.json").write_text("of another run")
        return renamed(old, new, flags)

    renamed = atomic._renamed
    monkeypatch.setattr(atomic, "_renamed", late)
    with pytest.raises(WriteFailed, match="It appeared meanwhile"):
        build(tmp_path / "first")
    build(tmp_path / "second", overwrite=True)
    assert content(tmp_path / "first") == "of another run"
    assert content(tmp_path / "second") == "new"


def test_runs_that_replace_one_folder_at_once_finish_or_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said: set[str] = set()

    def replace(number: int) -> int:
        done = 0
        for _ in range(10):
            try:
                with building(out, overwrite=True) as folder:
                    for name in [PROVENANCE_NAME, *map(str, range(20))]:
                        (folder / name).write_text(str(number))
                done += 1
            except CheckpointError as error:
                said.add(re.sub(r".*(another run is writing).*", r"\1", str(error)))
        return done

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(replace, range(4))) > 0
    assert said <= {"another run is writing"}
    assert len({path.read_text() for path in out.iterdir()}) == 1
    assert list(tmp_path.iterdir()) == [out]
