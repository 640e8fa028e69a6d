from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoint_files import safetensors_bytes, with_header

from headstart.checkpoint.dtypes import byte_size
from headstart.checkpoint.header import MAX_HEADER_BYTES, read_header
from headstart.errors import BrokenFile


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def entry(start: int, end: int, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [end - start] if shape is None else shape,
        "data_offsets": [start, end],
    }


def test_a_file_of_the_safetensors_library_is_read(file: Path) -> None:
    save_file(
        {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4)}, file, {"format": "pt"}
    )
    header = read_header(file)
    assert header.metadata == {"format": "pt"}
    assert (header.tensors["a"].dtype, header.tensors["a"].shape) == ("BF16", (2, 3))
    assert header.tensors["b"].num_bytes == 16


def test_empty_tensors_and_scalars_have_their_place(file: Path) -> None:
    save_file({"none": torch.empty(0, 4), "one": torch.tensor(1.0)}, file)
    header = read_header(file)
    assert header.tensors["none"].num_bytes == 0
    assert header.tensors["one"].shape == ()


def test_four_bit_tensors_take_half_a_byte_per_element() -> None:
    assert byte_size("F4", (3, 3)) == 5


@pytest.mark.parametrize("kept", [0, 4, 8, 20, -1], ids=lambda n: f"kept{n}")
def test_a_truncated_file_is_refused(file: Path, kept: int) -> None:
    file.write_bytes(safetensors_bytes({"a": b"x" * 10})[:kept])
    with pytest.raises(BrokenFile, match=r"model\.safetensors .*Download or copy the file again"):
        read_header(file)


def test_truncation_says_how_much_is_there_and_how_much_is_missing(file: Path) -> None:
    whole = safetensors_bytes({"a": b"x" * 10})
    file.write_bytes(whole[:-3])
    with pytest.raises(BrokenFile, match=f"truncated: {len(whole) - 3} bytes.*{len(whole)} expect"):
        read_header(file)


def test_an_absurd_header_length_is_refused(file: Path) -> None:
    file.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}")
    with pytest.raises(BrokenFile, match="claims a header of 100000001 bytes"):
        read_header(file)


def test_a_header_longer_than_the_file_is_refused(file: Path) -> None:
    file.write_bytes((1000).to_bytes(8, "little") + b"{}")
    with pytest.raises(BrokenFile, match="ends inside its header"):
        read_header(file)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, "'b' overlapping 'a'"),
        ({"a": entry(0, 2), "b": entry(4, 6)}, "2 unused bytes before 'b'"),
        ({"a": entry(0, 4)}, "2 bytes after its last tensor"),
        ({"a": entry(4, 0, shape=[4])}, "gives 'a' -4 bytes"),
        ({"a": entry(0, 6, shape=[7])}, "gives 'a' 6 bytes; U8 .7. needs 7"),
        ({"a": entry(0, 6, shape=[2**62] * 40)}, "needs 35841"),
        ({"a": entry(0, 6, shape=[1] * 100 + [6])}, "gives 'a' shape"),
        ({"a": entry(0, 6, dtype="F7")}, "unknown dtype 'F7'"),
        ({"a": entry(0, 6, dtype="x" * 1000)}, r"unknown dtype 'x+\.\.\."),
        ({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, r"shape \[True\]"),
        ({"a": {"dtype": "U8", "shape": [6], "data_offsets": [0, 6, 7]}}, r"\[0, 6, 7\]"),
        ({"a": {"dtype": "U8", "shape": [-6], "data_offsets": [0, 6]}}, r"shape \[-6\]"),
        ({"a": {"dtype": ["U8"], "shape": [6], "data_offsets": [0, 6]}}, "unknown dtype"),
        ({"a": 3}, "'a' with something that is not an object"),
        ({"__metadata__": [], "a": entry(0, 6)}, "__metadata__ that is not"),
        ([1], "not a JSON object"),
        (b'{"a": NaN}', "'a' with something that is not an object"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe{\x00}\x00", "not JSON"),
        (b'{"\\ud800": {"dtype":"U8","shape":[6],"data_offsets":[0,6]}}', "not Unicode text"),
        (b'{"__metadata__": {"x": "\\udfff"}}', "not Unicode text"),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(file: Path, header: Any, message: str) -> None:
    file.write_bytes(with_header(header, b"123456"))
    with pytest.raises(BrokenFile, match=message) as raised:
        read_header(file)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < len(str(file)) + 500


def test_a_name_given_twice_is_refused(file: Path) -> None:
    one = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    file.write_bytes(with_header(b"{" + one + b"," + one + b"}", b"1"))
    with pytest.raises(BrokenFile, match="names 'a' twice"):
        read_header(file)


def test_a_folder_or_a_pipe_is_not_opened(file: Path, tmp_path: Path) -> None:
    os.mkfifo(file)
    with pytest.raises(BrokenFile, match="is not a plain file"):
        read_header(file)
    with pytest.raises(BrokenFile, match="is not a plain file"):
        read_header(tmp_path)


def test_a_link_that_points_nowhere_says_so(file: Path, tmp_path: Path) -> None:
    file.symlink_to(tmp_path / "gone")
    with pytest.raises(BrokenFile, match=r"No such file.*where the link points"):
        read_header(file)
