from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checkpoint_files import make_folder

from headstart.checkpoint import index as module
from headstart.checkpoint.index import INDEX_NAME, read_index
from headstart.errors import BrokenFile, BrokenIndex, CheckpointError

TWO = {"one.safetensors": {"a": b"1", "b": b"22"}, "two.safetensors": {"c": b"3"}}


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    index = read_index(make_folder(tmp_path / "m", {"model.safetensors": {"a": b"1"}}))
    assert list(index.tensors) == ["a"]
    assert not index.has_index


def test_shards_are_read_with_and_without_an_index(tmp_path: Path) -> None:
    without = read_index(make_folder(tmp_path / "without", TWO))
    with_index = read_index(make_folder(tmp_path / "with", TWO, index=True))
    assert set(without.tensors) == set(with_index.tensors) == {"a", "b", "c"}
    assert with_index.has_index and with_index.unlisted == ()


def test_hidden_files_are_no_part_of_a_model(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", TWO)
    (folder / "._one.safetensors").write_bytes(b"left by a copying tool")
    assert set(read_index(folder).tensors) == {"a", "b", "c"}


def test_side_files_that_the_index_misses_are_found(tmp_path: Path) -> None:
    weight_map = {"a": "one.safetensors", "b": "one.safetensors"}
    index = read_index(make_folder(tmp_path / "m", TWO, index=weight_map))
    assert index.unlisted == ("two.safetensors",)
    assert "c" in index.tensors


def test_tensors_of_a_shard_come_in_file_order(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", {"m.safetensors": {"z": b"1", "a": b"2"}})
    assert [info.name for info in read_index(folder).shards["m.safetensors"]] == ["z", "a"]


def test_an_index_that_names_a_missing_shard_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", TWO, index={"a": "one.safetensors", "z": "no\nfile"})
    with pytest.raises(BrokenIndex, match=r"names 'no\\nfile', which is not.*Download the missing"):
        read_index(folder)


def test_an_index_that_names_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", TWO, index={"zz": "one.safetensors"})
    with pytest.raises(BrokenIndex, match="places 'zz' in a shard that does not hold it"):
        read_index(folder)


@pytest.mark.parametrize(
    "entry",
    ["/etc/x.safetensors", "../m/one.safetensors", "sub/one.safetensors", "..", ".", "", "a\\b",
     "a\0b", "one.safetensors/"],
)  # fmt: skip
def test_an_index_cannot_reach_outside_its_folder(tmp_path: Path, entry: str) -> None:
    folder = make_folder(tmp_path / "m", TWO, index={"a": entry})
    with pytest.raises(BrokenIndex, match="expected a plain file name in the same folder"):
        read_index(folder)


@pytest.mark.parametrize("weight_map", [[], "x", {"a": 1}, {"a": None}, 7], ids=repr)
def test_a_weight_map_of_another_type_is_refused(tmp_path: Path, weight_map: Any) -> None:
    folder = make_folder(tmp_path / "m", TWO, index=weight_map)
    with pytest.raises(BrokenIndex, match="has no weight_map"):
        read_index(folder)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[" * 100_000], ids=["empty", "cut", "bytes", "deep"]
)
def test_an_index_that_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = make_folder(tmp_path / "m", TWO)
    (folder / INDEX_NAME).write_bytes(content)
    with pytest.raises(BrokenIndex, match=r"cannot be read.*Download the file again"):
        read_index(folder)


def test_an_index_link_that_points_nowhere_is_not_the_same_as_no_index(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", TWO)
    (folder / INDEX_NAME).symlink_to(tmp_path / "gone")
    with pytest.raises(BrokenIndex, match="No such file"):
        read_index(folder)


def test_equal_copies_of_a_tensor_are_accepted_and_listed(tmp_path: Path) -> None:
    shards = {"one.safetensors": {"a": b"1"}, "two.safetensors": {"a": b"1"}}
    index = read_index(make_folder(tmp_path / "m", shards, index={"a": "two.safetensors"}))
    assert index.duplicates == {"a": ("one.safetensors", "two.safetensors")}
    assert index.tensors["a"].file.name == "two.safetensors", "the index decides"


def test_a_tensor_in_two_shards_with_different_bytes_is_refused(tmp_path: Path) -> None:
    shards = {"one.safetensors": {"a": b"1"}, "two.safetensors": {"a": b"2"}}
    folder = make_folder(tmp_path / "m", shards)
    with pytest.raises(BrokenFile, match=r"'a' is in .*one.* and in .*two.*Remove the shard"):
        read_index(folder)


def test_a_disk_that_fails_while_copies_are_compared_gives_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "same_bytes", fail)
    shards = {"one.safetensors": {"a": b"1"}, "two.safetensors": {"a": b"1"}}
    with pytest.raises(BrokenFile, match="Input/output error"):
        read_index(make_folder(tmp_path / "m", shards))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "pickled weights.*save_pretrained"),
        ("consolidated.00.pth", "pickled weights.*save_pretrained"),
        ("model.gguf", "GGUF files"),
        ("readme.txt", "no .*safetensors file"),
    ],
)
def test_a_folder_without_safetensors_says_what_to_do(
    tmp_path: Path, name: str, message: str
) -> None:
    folder = make_folder(tmp_path / "m", {})
    (folder / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        read_index(folder)
