from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headstart.checkpoint.gguf.values import cast
from headstart.checkpoint.source import FileSlice, TensorSource, concatenated, reshaped, rows
from headstart.checkpoint.values import as_bytes, load, one_thread, swapped_halves, to_float32
from headstart.errors import BrokenFile


def in_file(path: Path, tensor: torch.Tensor) -> TensorSource:
    path.write_bytes(bytes(as_bytes(tensor)))
    piece = FileSlice(path, 0, path.stat().st_size)
    return TensorSource("F32", tuple(tensor.shape), lambda: (piece,), is_copy=True)


def test_rows_are_cut_from_the_file_without_loading_the_rest(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(4, 3)
    part = rows(in_file(tmp_path / "a", matrix), 1, 3)
    assert torch.equal(load(part), matrix[1:3])
    assert list(part.pieces()) == [FileSlice(tmp_path / "a", 12, 36)]


def test_rows_are_cut_across_pieces(tmp_path: Path) -> None:
    left, right = torch.arange(6.0).view(2, 3), torch.arange(6.0, 12.0).view(2, 3)
    both = concatenated([in_file(tmp_path / "a", left), in_file(tmp_path / "b", right)], (4, 3))
    assert torch.equal(load(rows(both, 1, 3)), torch.cat([left, right])[1:3])
    assert torch.equal(load(reshaped(both, (2, 6))), torch.cat([left, right]).view(2, 6))
    assert both.is_copy


def test_rows_of_computed_pieces_are_cut_too() -> None:
    data = bytes(range(8))
    source = TensorSource("U8", (4, 2), lambda: (data[:3], data[3:]), is_copy=False)
    assert load(rows(source, 1, 3)).flatten().tolist() == [2, 3, 4, 5]


def test_an_empty_tensor_loads_as_one() -> None:
    source = TensorSource("BF16", (0, 4), lambda: (), is_copy=True)
    assert load(source).shape == (0, 4)


def test_swapping_halves_twice_gives_the_matrix_back(tmp_path: Path) -> None:
    source = in_file(tmp_path / "a", torch.arange(3000 * 4.0).view(3000, 4))
    swapped = swapped_halves(source)
    assert load(swapped)[0].tolist() == [2.0, 3.0, 0.0, 1.0]
    assert torch.equal(load(swapped_halves(swapped)), load(source))


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source = in_file(tmp_path / "a", torch.arange(12.0))
    (tmp_path / "a").write_bytes(b"1234")
    with pytest.raises(BrokenFile, match="a became shorter while it was read"):
        load(source)


def test_a_file_that_shrinks_while_it_is_cast_is_refused(tmp_path: Path) -> None:
    source = cast(in_file(tmp_path / "a", torch.arange(12.0)), "BF16")
    (tmp_path / "a").write_bytes(b"1234")
    with pytest.raises(BrokenFile, match="a became shorter while it was read"):
        list(source.pieces())


def test_every_fp8_value_converts_as_torch_does_it() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected, got = every.to(torch.float32), to_float32(every)
    is_nan = expected.isnan()
    assert torch.equal(got.isnan(), is_nan)
    assert torch.equal(got[~is_nan].view(torch.int32), expected[~is_nan].view(torch.int32))
    assert to_float32(every[:0]).shape == (0,)
    assert torch.equal(to_float32(torch.tensor([3], dtype=torch.int8)), torch.tensor([3.0]))


def test_one_thread_is_given_back() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
