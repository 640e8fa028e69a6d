"""K-quants through llama-quantize: here a stand-in for it, which shows what it is given."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from headstart.checkpoint.gguf.fields import STRING, field
from headstart.checkpoint.gguf.header import read_gguf_header
from headstart.checkpoint.gguf.quantize_tool import TYPES, quantized_by_tool
from headstart.checkpoint.gguf.shard import GgufShard
from headstart.checkpoint.gguf.values import cast
from headstart.checkpoint.source import TensorSource
from headstart.errors import CheckpointError, ConfigError

SHAPE = (2, 3, 256)  # a stack of matrices, whose rows are quantised one by one
DATA = np.arange(2 * 3 * 256, dtype="<f4").tobytes()
BYTES = {"Q6_K": 210, "Q4_K": 144}


def plain() -> TensorSource:
    return TensorSource("F32", SHAPE, lambda: (DATA,), is_copy=False)


def answer(path: Path, kind: str, *, name: str = "blk.0.ffn_up.weight") -> bytes:
    """The file that the stand-in gives, and the bytes of its tensor."""
    data = np.random.default_rng(0).bytes(6 * BYTES[kind])
    source = TensorSource(kind, (6, 256), lambda: (data,), is_copy=False)
    shard = GgufShard({name: source}, (field("general.architecture", "llama", STRING),))
    path.write_bytes(shard.header() + data.ljust(-(-len(data) // 32) * 32, b"\0"))
    return data


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a stand-in; `given.gguf` is what it got, `answer.gguf` what it gives."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = f'#!/bin/sh\necho "$@" >> {folder}/words\ncp "$2" {folder}/given.gguf\n'
    script += f'cp {folder}/answer.gguf "$3" || exit 3\n'
    (folder / "llama-quantize").write_text(script)
    (folder / "llama-quantize").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return folder


def test_a_tensor_goes_through_the_tool_and_leaves_nothing(tool: Path, tmp_path: Path) -> None:
    expected = answer(tool / "answer.gguf", "Q6_K")
    made = cast(plain(), "Q6_K")
    assert not (tool / "words").exists(), "nothing runs before bytes are asked for"
    assert (made.dtype, made.shape) == ("Q6_K", SHAPE)
    assert b"".join(bytes(piece) for piece in made.pieces()) == expected
    words = (tool / "words").read_text().split()
    assert words[0] == "--pure" and words[3:] == ["Q6_K", "1"]
    given = read_gguf_header(tool / "given.gguf")
    [info] = given.tensors.values()
    assert (info.dtype, info.shape) == ("F32", (6, 256))
    assert (tool / "given.gguf").read_bytes()[info.start : info.end] == DATA
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_every_type_has_a_name_of_the_tool(tool: Path) -> None:
    answer(tool / "answer.gguf", "Q4_K")
    list(quantized_by_tool(plain(), "Q4_K").pieces())
    assert (tool / "words").read_text().split()[3] == TYPES["Q4_K"] == "Q4_K_S"


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("Q4_K", "blk.0.ffn_up.weight", "gave Q4_K where Q6_K was asked for"),
        ("Q6_K", "other", "gave no tensor where Q6_K"),
    ],
)
def test_another_answer_is_refused(
    tool: Path, tmp_path: Path, kind: str, name: str, said: str
) -> None:
    answer(tool / "answer.gguf", kind, name=name)
    with pytest.raises(CheckpointError, match=said):
        list(quantized_by_tool(plain(), "Q6_K").pieces())
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_a_tool_that_fails_is_one_line(tool: Path) -> None:
    made = quantized_by_tool(plain(), "Q6_K")
    with pytest.raises(
        CheckpointError, match=r"made no Q6_K of a tensor \(status 3\): .*answer\.gguf"
    ):
        list(made.pieces())
    (tool / "llama-quantize").write_text("no program")
    with pytest.raises(CheckpointError, match=r"cannot be run \(Exec format error\)"):
        list(made.pieces())


def test_a_folder_for_temporary_files_that_is_not_there_is_said(
    tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="Set TMPDIR to another disk"):
        list(quantized_by_tool(plain(), "Q6_K").pieces())


def test_without_the_tool_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="llama-quantize, which is not on the path"):
        cast(plain(), "Q5_K")
