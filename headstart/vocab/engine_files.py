"""Draft vocabularies as engines and trainers want them: one map per file, little else.

SGLang's token map is a plain list of ids. EAGLE-3 checkpoints hold `d2t`, offsets of ascending
ids, and `t2d`, a flag per token of the trunk.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from headstart.checkpoint.gguf.fields import STRING, UINT32, field
from headstart.checkpoint.gguf.header import read_gguf_header
from headstart.checkpoint.gguf.shard import GgufShard, padded
from headstart.checkpoint.source import TensorSource
from headstart.errors import DataError, first_line
from headstart.vocab.draft_vocab import DraftVocab, from_d2t, from_t2d, to_d2t, to_t2d

_VOCAB_SIZE = "headstart.vocab_size"
AGAIN = "Make the file again with `headstart vocab`."


def token_map(vocab: DraftVocab) -> bytes:
    """What SGLang's --speculative-token-map loads: a plain list of ints."""
    import torch

    buffer = io.BytesIO()
    torch.save(list(vocab.ids), buffer)
    return buffer.getvalue()


def read_token_map(path: Path) -> list[DraftVocab]:
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever an unpickler makes of foreign bytes
        reason = str(error).partition("\n")[0][:100]
        raise DataError(f"cannot be read as a token map ({reason}). {AGAIN}") from error
    if isinstance(found, torch.Tensor) and found.dim() == 1 and not found.is_floating_point():
        found = found.tolist()
    return [DraftVocab.of(whole_numbers(found))]


def _arrays(vocab: DraftVocab) -> dict[str, Any]:
    import numpy as np

    if vocab.vocab_size is None:
        raise DataError("t2d needs the size of the model's vocabulary, which this map lacks.")
    return {
        "d2t": np.array(to_d2t(vocab.ids), dtype=np.int64),
        "t2d": np.array(to_t2d(vocab.ids, vocab.vocab_size), dtype=np.bool_),
    }


def tensors(vocab: DraftVocab) -> bytes:
    """A safetensors file with d2t and t2d."""
    from safetensors.numpy import save

    facts = {"name": vocab.name, "language": vocab.language, "tokenizer_sha": vocab.tokenizer_sha}
    known = {key: value for key, value in facts.items() if value}
    data: bytes = save(_arrays(vocab), metadata=known)
    return data


def array_file(vocab: DraftVocab, kind: str) -> bytes:
    """A .npy file with d2t or t2d."""
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, _arrays(vocab)[kind], allow_pickle=False)
    return buffer.getvalue()


def read_tensors(path: Path) -> list[DraftVocab]:
    """d2t, t2d or both, alone or among the tensors of an EAGLE-3 checkpoint."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names = set(file.keys())
            facts = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in ("d2t", "t2d") if name in names}
    except (SafetensorError, OSError, TypeError) as error:
        raise DataError(f"cannot be read as safetensors ({error}). {AGAIN}") from error
    if not found:
        raise DataError("has neither d2t nor t2d; give a file with one of them.")
    known = {key: facts[key] for key in ("name", "language", "tokenizer_sha") if key in facts}
    vocabs = [_from_array(array, **known) for array in found.values()]
    if len({vocab.ids for vocab in vocabs}) > 1:
        raise DataError(f"d2t and t2d name different tokens. {AGAIN}")
    return [vocabs[-1]]  # t2d, where it is there, also tells the size of the vocabulary


def has_other_tensors(path: Path) -> bool:
    """Whether a readable file of tensors is more than a draft vocabulary."""
    from safetensors import safe_open

    if path.suffix == ".gguf":
        return set(read_gguf_header(path).tensors) != {"d2t"}
    with safe_open(path, framework="numpy") as file:
        return bool(set(file.keys()) - {"d2t", "t2d"})


def gguf_map(vocab: DraftVocab) -> bytes:
    """A GGUF file with d2t alone: the target's ids themselves, not offsets as in EAGLE-3's."""
    import struct

    data = struct.pack(f"<{len(vocab.ids)}q", *vocab.ids)
    source = TensorSource("I64", (len(vocab.ids),), lambda: (data,), is_copy=False)
    facts = {"general.type": "draft-vocabulary", "general.name": vocab.name}
    facts |= {"headstart.tokenizer_sha": vocab.tokenizer_sha} if vocab.tokenizer_sha else {}
    fields = [field(name, value, STRING) for name, value in facts.items()]
    if vocab.vocab_size is not None:
        fields.append(field(_VOCAB_SIZE, vocab.vocab_size, UINT32))
    shard = GgufShard({"d2t": source}, tuple(fields))
    return shard.header() + data.ljust(padded(len(data), shard.alignment), b"\0")


def read_gguf_map(path: Path) -> list[DraftVocab]:
    """d2t alone or among the tensors of a draft model of llama.cpp."""
    import struct

    header = read_gguf_header(path)
    found = header.tensors.get("d2t")
    if found is None or found.dtype != "I64" or len(found.shape) != 1:
        raise DataError(f"holds no d2t of whole numbers. {AGAIN}")
    with path.open("rb") as file:
        file.seek(found.start)
        ids = struct.unpack(f"<{found.shape[0]}q", file.read(found.num_bytes))
    size, tokens = header.fields.get(_VOCAB_SIZE), header.fields.get("tokenizer.ggml.tokens")
    sha = header.fields.get("headstart.tokenizer_sha")
    return [
        DraftVocab.of(
            whole_numbers(list(ids)),
            vocab_size=int(size.value)
            if size is not None and size.kind == UINT32
            else (tokens.length if tokens is not None else None),
            tokenizer_sha=sha.value if sha is not None and sha.kind == STRING else None,
        )
    ]


def read_array(path: Path) -> list[DraftVocab]:
    import numpy as np

    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:  # numpy takes headers for Python, and raises what Python raises
        raise DataError(f"cannot be read as an array ({first_line(error)}). {AGAIN}") from error
    return [_from_array(array)]


def _from_array(array: Any, **facts: Any) -> DraftVocab:
    if getattr(array, "ndim", 0) != 1 or array.dtype.kind not in "bi":
        raise DataError("expected one row of offsets (d2t, whole numbers) or of flags (t2d, bool).")
    if array.dtype.kind == "b":
        return DraftVocab.of(from_t2d(array.tolist()), vocab_size=len(array), **facts)
    return DraftVocab.of(from_d2t(array.tolist()), **facts)


def whole_numbers(values: Any, name: str = "default") -> list[int]:
    """`values` as they are; DataError unless they are a list of ints."""
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise DataError(f"map {name!r}: ids are not a list of whole numbers. {AGAIN}")
    return values
