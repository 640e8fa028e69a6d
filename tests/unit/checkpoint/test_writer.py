from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from support.checkpoint_files import computed, leftovers, make_folder, snapshot

from headstart.checkpoint import transfer, writer
from headstart.checkpoint.header import read_header
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import FileSlice, TensorSource
from headstart.checkpoint.writer import (
    FolderPlan,
    Shard,
    header_bytes,
    index_document,
    split_shards,
    write_folder,
)
from headstart.errors import BrokenFile, WriteFailed

BIG = bytes(range(256)) * 40


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shards = {"one.safetensors": {"a": BIG, "b": b"22"}, "two.safetensors": {"c": BIG[::-1]}}
    folder = make_folder(tmp_path / "model", shards, index=True)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def rewriting(model: Path) -> FolderPlan:
    """One shard written anew from slices and memory, one copied, a tokenizer carried along."""
    checkpoint = Checkpoint.open(model)
    tensors = {"a": checkpoint.source("a"), "b": checkpoint.source("b"), "new": computed(b"xyz")}
    copies = {name: model / name for name in ("two.safetensors", "tokenizer.json")}
    return FolderPlan({"one.safetensors": Shard(tensors)}, copies, {"config.json": {"x": 1}})


def write(plan: FolderPlan, out: Path, **options: Any) -> None:
    write_folder(plan, out, provenance={"operation": "test"}, **options)


def check(model: Path, out: Path) -> None:
    """The result is right, the source untouched, nothing else was left."""
    result = Checkpoint.open(out)
    with safe_open(out / "one.safetensors", "np") as opened:
        assert opened.get_tensor("a").tobytes() == BIG
        assert opened.get_tensor("new").tobytes() == b"xyz"
    assert (out / "two.safetensors").read_bytes() == (model / "two.safetensors").read_bytes()
    assert set(result.tensors) == {"a", "b", "c", "new"}
    assert leftovers(out.parent) == []


def nothing_left(out: Path) -> bool:
    return not out.exists() and leftovers(out.parent) == []


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_folder_is_written_whole(model: Path, tmp_path: Path) -> None:
    before = snapshot(model)
    write(rewriting(model), tmp_path / "out")
    check(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "headstart.json").read_text()) == {"operation": "test"}
    assert snapshot(model) == before


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP])
def test_without_range_copies_it_reads_and_writes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(transfer.os, "copy_file_range", failing(code))
    monkeypatch.setattr(transfer, "_BUFFER_BYTES", 100)
    write(rewriting(model), tmp_path / "out")
    check(model, tmp_path / "out")


def test_range_copies_that_stop_early_are_continued(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.copy_file_range, []

    def short(source: int, target: int, count: int, **options: int) -> int:
        calls.append(count)
        return real(source, target, min(count, 1000), **options)

    monkeypatch.setattr(transfer.os, "copy_file_range", short)
    write(rewriting(model), tmp_path / "out")
    check(model, tmp_path / "out")
    assert len(calls) > 5


def test_a_range_copy_that_copies_nothing_falls_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some kernels answer 0 for files of /proc and of network file systems."""
    monkeypatch.setattr(transfer.os, "copy_file_range", lambda *_, **__: 0)
    write(rewriting(model), tmp_path / "out")
    check(model, tmp_path / "out")


def test_shards_share_their_blocks_where_the_file_system_can(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(target: int, request: int, source: int) -> int:
        os.sendfile(target, source, 0, os.fstat(source).st_size)
        return 0

    def no_copy(*_: Any, **__: Any) -> int:
        raise AssertionError("copied although blocks could be shared")

    monkeypatch.setattr(fcntl, "ioctl", clone)
    monkeypatch.setattr(transfer.os, "copy_file_range", no_copy)
    plan = FolderPlan(copies={"two.safetensors": model / "two.safetensors"})
    write(plan, tmp_path / "out")
    assert snapshot(tmp_path / "out")["two.safetensors"] == snapshot(model)["two.safetensors"]


def test_hard_links_are_made_only_when_asked_for_and_only_for_shards(
    model: Path, tmp_path: Path
) -> None:
    plan = rewriting(model)
    write(plan, tmp_path / "copied")
    write(plan, tmp_path / "linked", copying="link")
    shard, tokenizer = "two.safetensors", "tokenizer.json"
    assert not (tmp_path / "copied" / shard).samefile(model / shard)
    assert (tmp_path / "linked" / shard).samefile(model / shard)
    assert not (tmp_path / "linked" / tokenizer).samefile(model / tokenizer)
    check(model, tmp_path / "linked")


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_links_are_not_possible_files_are_copied(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(transfer.os, "link", failing(code))
    write(rewriting(model), tmp_path / "out", copying="link")
    check(model, tmp_path / "out")


def test_copies_may_go_into_sub_folders(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text("x = 1")
    write(FolderPlan(copies={"a/b/x.py": source, "a/y.py": source}), tmp_path / "out")
    assert (tmp_path / "out/a/b/x.py").read_text() == "x = 1"
    assert (tmp_path / "out/a/y.py").read_text() == "x = 1"


def test_a_copy_in_a_sub_folder_is_read_back_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "x.py"
    source.write_text("x = 1")

    def wrong(source: Path, target: Path, *_: object) -> None:
        target.write_text("x = 2")

    monkeypatch.setattr(writer, "copy_file", wrong)
    with pytest.raises(WriteFailed, match="does not read back"):
        write(FolderPlan(copies={"a/x.py": source}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/tmp/x", "", "a\0b"])
def test_names_that_leave_the_result_are_refused(tmp_path: Path, name: str) -> None:
    source = tmp_path / "x.py"
    source.write_text("x = 1")
    with pytest.raises(WriteFailed, match="inside the result"):
        write(FolderPlan(copies={name: source}), tmp_path / "out")
    assert nothing_left(tmp_path / "out")


def test_links_of_a_hub_cache_become_files(model: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.safetensors"
    link.symlink_to(model / "two.safetensors")
    for copying in ("copy", "link"):
        out = tmp_path / copying
        write(FolderPlan(copies={"two.safetensors": link}), out, copying=copying)
        assert not (out / "two.safetensors").is_symlink()
        assert (out / "two.safetensors").read_bytes() == link.read_bytes()


@pytest.mark.parametrize("call", ["write", "copy_file_range", "fsync", "fdatasync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["full", "quota"])
def test_a_full_disk_is_one_clear_line_and_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    monkeypatch.setattr(transfer, "_FLUSH_BYTES", 1)
    monkeypatch.setattr(transfer.os, call, failing(code))
    with pytest.raises(WriteFailed, match=r"^no space left on the disk of .*out \(.* GB free\)"):
        write(rewriting(model), tmp_path / "out")
    assert nothing_left(tmp_path / "out")


@pytest.mark.parametrize("copying", ["copy", "link"])
def test_too_little_space_is_noticed_before_the_long_copy(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copying: Any
) -> None:
    """Of 20 kB half are written anew; the other half only counts if it must be copied."""
    usage = writer.shutil.disk_usage(tmp_path)._replace(free=12_000)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(transfer, "_cloned", lambda *_: False)
    if copying == "link":
        write(rewriting(model), tmp_path / "out", copying="link")
        return
    with pytest.raises(WriteFailed, match=r"no space: .*out needs 0\.000 GB.*Free some space"):
        write(rewriting(model), tmp_path / "out")
    assert nothing_left(tmp_path / "out")


def test_other_failures_of_the_system_name_the_cause(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer.os, "copy_file_range", failing(errno.EIO))
    with pytest.raises(
        WriteFailed, match=r"cannot write .*Input/output error.*Nothing was kept\. Choose"
    ):
        write(rewriting(model), tmp_path / "out")
    assert nothing_left(tmp_path / "out")


def test_a_source_that_vanished_is_named(model: Path, tmp_path: Path) -> None:
    plan = rewriting(model)
    (model / "one.safetensors").unlink()
    with pytest.raises(WriteFailed, match=r"No such file.*one\.safetensors"):
        write(plan, tmp_path / "out")
    (model / "two.safetensors").unlink()
    with pytest.raises(WriteFailed, match=r"two\.safetensors cannot be read"):
        write(plan, tmp_path / "out")
    assert nothing_left(tmp_path / "out")


def test_a_source_that_shrinks_meanwhile_is_refused(model: Path, tmp_path: Path) -> None:
    plan = rewriting(model)
    os.truncate(model / "one.safetensors", 500)
    with pytest.raises(BrokenFile, match=r"one\.safetensors became shorter while it was read"):
        write(plan, tmp_path / "out")
    assert nothing_left(tmp_path / "out")


@pytest.mark.parametrize("file", ["one.safetensors", "two.safetensors", "tokenizer.json"])
def test_a_source_that_changes_while_it_is_copied_is_noticed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    real = writer._write_document

    def change_then_write(path: Path, document: Any) -> None:
        data = bytearray((model / file).read_bytes())
        data[-1] = 7
        (model / file).write_bytes(data)
        real(path, document)

    started: list[tuple[Any, ...]] = []

    class Late(writer.Proof):
        """Compares only once everything was written, as on a slow machine."""

        def copied(self, *arguments: Any) -> None:
            started.append((super().copied, *arguments))

        def file(self, *arguments: Any) -> None:
            started.append((super().file, *arguments))

        def finish(self) -> None:
            for call, *arguments in started:
                call(*arguments)
            super().finish()

    monkeypatch.setattr(writer, "Proof", Late)
    monkeypatch.setattr(writer, "_write_document", change_then_write)
    plan = rewriting(model)
    with pytest.raises(WriteFailed, match=f"{file}.*not read back.*source was changed meanwhile"):
        write(FolderPlan(plan.shards, plan.copies, {"config.json": {}}), tmp_path / "out")
    assert nothing_left(tmp_path / "out")


@pytest.mark.parametrize("place", ["header", "copied", "computed"])
def test_bytes_that_do_not_read_back_are_noticed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A failing disk: what arrives in the file is not what was written."""
    real = transfer.write_all
    fragment = {"header": b'"dtype"', "copied": BIG[:300], "computed": b"xyz"}[place]

    def damaged(target: int, data: Any) -> None:
        real(target, bytes(data).replace(fragment, fragment[:-1] + b"Z"))

    monkeypatch.setattr(transfer, "write_all", damaged)
    monkeypatch.setattr(writer, "write_all", damaged)
    monkeypatch.setattr(transfer.os, "copy_file_range", failing(errno.EXDEV))
    with pytest.raises(Exception, match=r"read back|safetensors"):
        write(rewriting(model), tmp_path / "out")
    assert nothing_left(tmp_path / "out")


def test_a_tensor_that_is_read_from_the_wrong_place_is_noticed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof does not trust the offsets that the writer used."""
    real = writer.header_bytes

    def swapped(shard: Shard) -> tuple[bytes, list[str]]:
        header, order = real(shard)
        return header, order[::-1]

    monkeypatch.setattr(writer, "header_bytes", swapped)
    with pytest.raises(WriteFailed, match="read back other tensors than were written"):
        write(rewriting(model), tmp_path / "out")


def test_a_tensor_of_another_size_than_announced_is_refused(tmp_path: Path) -> None:
    lying = TensorSource("U8", (4,), lambda: (b"123",), is_copy=False)
    with pytest.raises(WriteFailed, match="t: produced 3 bytes, expected 4"):
        write(FolderPlan({"m.safetensors": Shard({"t": lying})}), tmp_path / "out")
    assert nothing_left(tmp_path / "out")


def test_an_interrupt_while_a_tensor_is_computed_leaves_nothing(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"12"
        raise KeyboardInterrupt

    source = TensorSource("U8", (4,), pieces, is_copy=False)
    with pytest.raises(KeyboardInterrupt):
        write(FolderPlan({"m.safetensors": Shard({"t": source})}), tmp_path / "out")
    assert nothing_left(tmp_path / "out")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002], ids=oct)
def test_files_get_the_mode_that_the_umask_asks_for(model: Path, tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write(rewriting(model), tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {0o666 & ~mask}, modes


def test_no_file_stays_open(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    write(rewriting(model), tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(transfer.os, "fsync", failing(errno.EIO))
        with pytest.raises(WriteFailed):
            write(rewriting(model), tmp_path / "out2")
    assert len(os.listdir("/proc/self/fd")) == before


def test_progress_counts_every_byte_once(model: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    plan = rewriting(model)
    write(plan, tmp_path / "out", report=seen.append)
    assert sum(seen) == plan.num_bytes


def test_text_that_no_file_can_hold_is_written_as_json_escapes(tmp_path: Path) -> None:
    documents = {"config.json": {"x": "\ud800"}, "b.json": '{"x": "\udfff"}'}
    write(FolderPlan(documents=documents), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"x": "\ud800"}
    assert json.loads((tmp_path / "out" / "b.json").read_text()) == {"x": "\udfff"}


def test_shards_are_cut_at_the_chosen_size() -> None:
    tensors = {name: computed(b"1234") for name in "abcde"}
    shards = split_shards(tensors, shard_bytes=9)
    assert [sorted(shard.tensors) for shard in shards.values()] == [["a", "b"], ["c", "d"], ["e"]]
    assert next(iter(shards)) == "model-00001-of-00003.safetensors"
    assert list(split_shards(tensors)) == ["model.safetensors"]


def test_a_tensor_larger_than_a_shard_has_one_to_itself() -> None:
    tensors = {"a": computed(b"1"), "big": computed(b"1" * 100), "c": computed(b"1")}
    assert [len(s.tensors) for s in split_shards(tensors, shard_bytes=10).values()] == [1, 1, 1]


def test_wide_dtypes_come_first_so_that_all_are_aligned(tmp_path: Path) -> None:
    shard = Shard({"a": computed(b"1"), "z": TensorSource("F32", (1,), lambda: (b"1234",), False)})
    header, order = header_bytes(shard)
    assert order == ["z", "a"]
    assert len(header) % 8 == 0
    write(FolderPlan({"m.safetensors": shard}), tmp_path / "out")
    assert read_header(tmp_path / "out" / "m.safetensors").metadata == {"format": "pt"}


def test_the_index_is_sorted_and_carries_the_total() -> None:
    document = index_document({"b": "y", "a": "x"}, 7)
    assert list(document["weight_map"]) == ["a", "b"]
    assert document["metadata"] == {"total_size": 7}


def test_the_index_keeps_other_metadata() -> None:
    document = index_document({"a": "x"}, 7, {"total_size": 3, "note": "n"})
    assert document["metadata"] == {"total_size": 7, "note": "n"}


def test_slices_of_several_files_make_one_tensor(model: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(model)
    a, c = checkpoint.info("a"), checkpoint.info("c")
    pieces = (FileSlice(a.file, a.start + 5, a.end), FileSlice(c.file, c.start, c.start + 7))
    source = TensorSource("U8", (len(BIG) + 2,), lambda: pieces, is_copy=True)
    write(FolderPlan({"m.safetensors": Shard({"t": source})}), tmp_path / "out")
    with safe_open(tmp_path / "out" / "m.safetensors", "np") as opened:
        assert opened.get_tensor("t").tobytes() == BIG[5:] + BIG[::-1][:7]
