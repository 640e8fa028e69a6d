"""K-quants: made by the `llama-quantize` on the path, one tensor at a time.

The tool takes whole models. A tensor is given to it as the only one of a model with the fewest keys
that it accepts, in a temporary folder; rows are quantised one by one, so the bytes are those that
it would give the tensor inside its own file.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path

from headstart.checkpoint.dtypes import byte_size
from headstart.checkpoint.gguf.fields import FLOAT32, STRING, UINT32, field
from headstart.checkpoint.gguf.header import read_gguf_header
from headstart.checkpoint.gguf.shard import GgufShard, padded
from headstart.checkpoint.source import TensorSource
from headstart.errors import BrokenFile, CheckpointError, ConfigError, some

TOOL = "llama-quantize"
# type of tensors -> what the tool calls a file of them
TYPES = {
    "Q2_K": "Q2_K", "Q3_K": "Q3_K_S", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S", "Q6_K": "Q6_K",
    "IQ4_NL": "IQ4_NL", "IQ4_XS": "IQ4_XS",
}  # fmt: skip
_NAME = "blk.0.ffn_up.weight"
_AT_ONCE = 1 << 22


def require_tool(kind: str) -> str:
    """The tool's path; ConfigError where there is none."""
    found = shutil.which(TOOL)
    if found is None:
        raise ConfigError(
            f"tensors of type {kind} are made by llama.cpp's {TOOL}, which is not on the path. "
            "Install llama.cpp, or take q8_0."
        )
    return found


def quantized_by_tool(source: TensorSource, kind: str) -> TensorSource:
    """The plain tensor in a type that only the tool makes; it runs when bytes are asked for."""
    require_tool(kind)

    def pieces() -> Iterator[bytes]:
        with _folder() as folder:
            given, made = Path(folder, "in.gguf"), Path(folder, "out.gguf")
            try:
                _write(source, given)
            except OSError as error:
                raise _no_room(error) from None
            _run([require_tool(kind), "--pure", str(given), str(made), TYPES[kind], "1"], kind)
            given.unlink()
            yield from _found(made, kind, source.shape)

    return TensorSource(kind, source.shape, pieces, is_copy=False)


def _folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="headstart-quantize-")
    except OSError as error:
        raise _no_room(error) from None


def _no_room(error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{TOOL} needs room for a tensor in the folder for temporary files, which cannot be "
        f"written ({error.strerror}). Set TMPDIR to another disk."
    )


def _write(source: TensorSource, file: Path) -> None:
    from headstart.checkpoint.gguf.values import byte_blocks

    shape = (prod(source.shape[:-1]), source.shape[-1])
    counts = {
        "block_count": 1, "context_length": 1, "embedding_length": shape[1],
        "feed_forward_length": shape[0], "attention.head_count": 1,
    }  # fmt: skip
    fields = (
        field("general.architecture", "llama", STRING),
        *(field(f"llama.{key}", value, UINT32) for key, value in counts.items()),
        field("llama.attention.layer_norm_rms_epsilon", 1e-6, FLOAT32),
    )
    flat = TensorSource(source.dtype, shape, source.pieces, is_copy=False)
    shard = GgufShard({_NAME: flat}, fields)
    with file.open("wb") as handle:
        handle.write(shard.header())
        for block in byte_blocks(source, _AT_ONCE):
            handle.write(block)
        size = byte_size(source.dtype, shape)
        handle.write(bytes(padded(size, shard.alignment) - size))


def _run(words: list[str], kind: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise CheckpointError(
            f"{words[0]} cannot be run ({error.strerror}). Install llama.cpp again, or take q8_0."
        ) from None
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise CheckpointError(
            f"{words[0]} made no {kind} of a tensor (status {done.returncode}): "
            f"{some(lines[-1:]) or 'it said nothing'}. Try it by hand, or take q8_0."
        )


def _found(file: Path, kind: str, shape: tuple[int, ...]) -> Iterator[bytes]:
    try:
        info = read_gguf_header(file).tensors.get(_NAME)
    except BrokenFile:
        info = None
    if info is None or info.dtype != kind or info.num_bytes != byte_size(kind, shape):
        raise CheckpointError(
            f"{TOOL} gave {'no tensor' if info is None else info.dtype} where {kind} was asked "
            "for. Take another type, or another build of llama.cpp."
        )
    with file.open("rb") as handle:
        handle.seek(info.start)
        left = info.num_bytes
        while left:
            block = handle.read(min(left, _AT_ONCE))
            yield block
            left -= len(block)
