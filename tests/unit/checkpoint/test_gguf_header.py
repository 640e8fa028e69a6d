"""Headers of GGUF files: read as the `gguf` package reads them, refused where it would go wrong."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.checkpoint.dtypes import GGUF_TYPES
from headstart.checkpoint.gguf import encoding, values
from headstart.checkpoint.gguf.fields import ARRAY, INT32, STRING, UINT32, Field, field
from headstart.checkpoint.gguf.header import read_gguf_header
from headstart.checkpoint.gguf.shard import GgufShard
from headstart.checkpoint.source import TensorSource, stored
from headstart.checkpoint.values import load
from headstart.checkpoint.writer import FolderPlan, write_folder
from headstart.errors import BrokenFile, HeadstartError, UnsupportedFamily, WriteFailed


def held(dtype: str, shape: tuple[int, ...], data: bytes) -> TensorSource:
    return TensorSource(dtype, shape, lambda: (data,), is_copy=False)


def written(folder: Path, shard: GgufShard) -> Path:
    write_folder(FolderPlan({"x.gguf": shard}), folder / "out", provenance={})
    return folder / "out" / "x.gguf"


FIELDS = (
    field("general.architecture", "qwen35", STRING),
    field("empty", "", STRING),
    field("none", [], ARRAY, INT32),
    field("counts", [1, -2, 3], ARRAY, INT32),
    field("tokens", ["a", "", "\u00e9"], ARRAY, STRING),
    field("general.alignment", 64, UINT32),
)
SHARD = GgufShard(
    {
        "a.weight": held("F32", (2, 3), bytes(range(24))),
        "b.weight": held("Q8_0", (1, 32), bytes(range(34))),
        "c": held("BF16", (5,), bytes(range(10))),
    },
    FIELDS,
    alignment=64,
)


def test_what_is_written_is_what_the_package_reads(tmp_path: Path) -> None:
    path = written(tmp_path, SHARD)
    theirs = GGUFReader(path)
    kinds = {"a.weight": "F32", "b.weight": "Q8_0", "c": "BF16"}
    assert {t.name: t.tensor_type.name for t in theirs.tensors} == kinds
    for tensor in theirs.tensors:
        assert tensor.data.tobytes() == bytes(range(tensor.n_bytes)), tensor.name
        assert tensor.data_offset % 64 == 0
    assert theirs.fields["counts"].contents() == [1, -2, 3]
    assert theirs.fields["tokens"].contents() == ["a", "", "\u00e9"]
    ours = read_gguf_header(path)
    assert tuple(ours.fields.values()) == FIELDS  # the empty ones too
    assert {n: (i.dtype, i.shape) for n, i in ours.tensors.items()} == {
        "a.weight": ("F32", (2, 3)), "b.weight": ("Q8_0", (1, 32)), "c": ("BF16", (5,)),
    }  # fmt: skip


def test_a_copy_of_a_file_of_the_package_is_the_same_bytes(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "theirs.gguf", "x")
    writer.add_float32("f", 0.1)
    writer.add_array("many", [f"t{i}" for i in range(300)])
    writer.add_tensor("w", np.arange(96, dtype=np.float16).reshape(3, 32))
    writer.add_tensor("v", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf_header(tmp_path / "theirs.gguf")
    tensors = {name: stored(info) for name, info in header.tensors.items()}
    path = written(tmp_path, GgufShard(tensors, tuple(header.fields.values())))
    assert path.read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_a_header_that_announces_something_else_is_noticed(tmp_path: Path) -> None:
    """The proof reads the file anew and does not trust what the writer meant."""

    class Lying(GgufShard):
        def header(self) -> bytes:
            return super().header().replace(b"a.weight", b"x.weight")

    class Forgetful(GgufShard):
        def header(self) -> bytes:
            return super().header().replace(b"counts", b"xounts")

    for kind in (Lying, Forgetful):
        with pytest.raises(WriteFailed, match="read back other tensors than were written"):
            written(tmp_path, kind(SHARD.tensors, SHARD.fields, SHARD.alignment))
        assert not (tmp_path / "out").exists()


def test_sizes_of_types_are_those_of_the_package() -> None:
    newer = {"Q2_0"}  # than the package
    for name in GGUF_TYPES.keys() - newer:
        number, block, size = GGUF_TYPES[name]
        kind = GGMLQuantizationType(number)
        assert (kind.name, GGML_QUANT_SIZES[kind]) == (name, (block, size))


def header_of(*parts: Any) -> bytes:
    return b"".join(p if isinstance(p, bytes) else struct.pack("<Q", p) for p in parts)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


START = b"GGUF" + struct.pack("<I", 3)
TENSOR = text("t") + struct.pack("<IQIQ", 1, 4, 0, 0)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GGUF", "has 4 bytes, too few"),
        (b"GGML" + bytes(40), "begins with b'GGML'"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version 1"),
        (header_of(START, 2**63, 0) + bytes(40), "claims 9223372036854775808 tensors"),
        (header_of(START, 0, 2**60) + bytes(40), "claims 1152921504606846976 keys"),
        (header_of(START, 0, 1, 2**40) + bytes(40), "name takes 1099511627776 bytes"),
        (header_of(START, 0, 1, text("k"), struct.pack("<I", 77)) + bytes(40), "unknown kind 77"),
        (header_of(START, 0, 1, text("k"), struct.pack("<IIQ", 9, 8, 2**50)) + bytes(40), "texts"),
        (header_of(START, 0, 1, text("k"), struct.pack("<IIQ", 9, 9, 1)) + bytes(40), "kind 9"),
        (header_of(START, 0, 1, text("k"), struct.pack("<IIQ", 9, 10, 2**60)) + bytes(9), "ends"),
        (header_of(START, 0, 2, *[text("k") + struct.pack("<II", 4, 1)] * 2), "'k' twice"),
        (header_of(START, 1, 0, text("t"), struct.pack("<I", 5)) + bytes(99), "5 dimensions"),
        (header_of(START, 1, 0, text("t"), struct.pack("<IQIQ", 1, 4, 137, 0)), "type 137"),
        (header_of(START, 1, 0, text("t"), struct.pack("<IQIQ", 1, 2**62, 0, 0)), "shape"),
        (header_of(START, 1, 0, text("t"), struct.pack("<IQIQ", 1, 33, 8, 0)), "shape"),
        (header_of(START, 1, 0, text("t"), struct.pack("<IQIQ", 1, 4, 0, 32)) + bytes(99), "gap"),
        (header_of(START, 2, 0, TENSOR, TENSOR) + bytes(99), "overlap"),
        (header_of(START, 1, 0, TENSOR), "is truncated"),
        (header_of(START, 1, 0, TENSOR) + bytes(4096), "bytes after its last tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hostile_header_is_refused_in_one_line(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(BrokenFile) as refused:
        read_gguf_header(tmp_path / "x.gguf")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_read_as_something_whole_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = SHARD.header() + bytes(3 * 64)
    start = data.draw(st.integers(0, len(whole) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=12))
    path = tmp_path_factory.mktemp("damaged") / "x.gguf"
    path.write_bytes(whole[:start] + patch + whole[start + len(patch) :])
    try:
        header = read_gguf_header(path)
    except HeadstartError as error:
        assert "\n" not in str(error)
        return
    size = path.stat().st_size
    assert all(0 < i.start <= i.end <= size for i in header.tensors.values())
    assert [found.value is not None for found in header.fields.values()]


def test_a_changed_key_keeps_its_kind() -> None:
    assert FIELDS[3].changed([7]) == field("counts", [7], ARRAY, INT32)
    assert FIELDS[5].changed(32) == Field("general.alignment", UINT32, struct.pack("<I", 32))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *encoding.QUANTIZED])
def test_values_are_quantised_and_read_as_by_the_package(kind: str) -> None:
    floats = np.random.default_rng(0).normal(0, 1, (3, 256)).astype(np.float32)
    source = held("F32", (3, 256), floats.tobytes())
    packed = values.cast(source, kind)
    raw = b"".join(bytes(piece) for piece in packed.pieces())
    expected = quantize(floats, GGMLQuantizationType[kind])
    assert raw == expected.tobytes()
    back = load(values.cast(held(kind, (3, 256), raw), "F32")).numpy()
    assert np.array_equal(back, dequantize(expected, GGMLQuantizationType[kind]))


def test_types_that_cannot_be_made_are_refused_before_anything_is_written() -> None:
    with pytest.raises(UnsupportedFamily, match=r"quantised to IQ2_S here; .* llama-quantize"):
        values.cast(held("F32", (1, 256), bytes(1024)), "IQ2_S")
    with pytest.raises(UnsupportedFamily, match="Q1_0 cannot be turned into F32"):
        values.cast(held("Q1_0", (1, 128), bytes(18)), "F32")


def test_matrices_of_a_stack_are_transposed_and_rows_interleaved() -> None:
    stack = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    turned = values.transposed(held("F32", (2, 3, 4), stack.tobytes()))
    assert turned.shape == (2, 4, 3)
    assert np.array_equal(load(turned).numpy(), stack.transpose(0, 2, 1))
    one, two = np.arange(8, dtype=np.float32), np.arange(100, 104, dtype=np.float32)
    parts = [held("F32", (4, 2), one.tobytes()), held("F32", (2, 2), two.tobytes())]
    rows = load(values.interleaved(parts, [2, 1])).numpy()
    assert rows.tolist() == [[0, 1], [2, 3], [100, 101], [4, 5], [6, 7], [102, 103]]
