"""Tokens as a model has them, without loading the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.errors import DataError, tokenizer_faults
from headstart.heads.formats.gguf import is_gguf_path, open_gguf
from headstart.heads.formats.gguf.tokenizer import tokenizer_of


@dataclass(frozen=True)
class Tokens:
    """A tokenizer, of a folder or behind a server; special tokens are left out."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str | None]  # None: there is no such token

    def count(self, text: str) -> int:
        return len(self.encode(text))


def folder_tokens(folder: str | Path) -> Tokens | None:
    """Of the tokenizer.json of a folder, or of a GGUF file; None where there is none."""
    made = gguf_documents(Path(folder))
    file = Path(folder) / "tokenizer.json"
    if "tokenizer.json" not in made and not file.is_file():
        return None
    from tokenizers import Tokenizer

    with tokenizer_faults(folder, DataError):  # what it raises is not specified
        if made:
            tokenizer = Tokenizer.from_str(made["tokenizer.json"])
        else:
            tokenizer = Tokenizer.from_file(str(file))

    def encode(text: str) -> Sequence[int]:
        with tokenizer_faults(folder, DataError):
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(ids: Sequence[int]) -> str | None:
        if max(ids) >= tokenizer.get_vocab_size():
            return None
        with tokenizer_faults(folder, DataError):
            return str(tokenizer.decode(list(ids)))

    return Tokens(encode, decode)


def gguf_documents(path: Path) -> dict[str, Any]:
    """The files of the tokenizer inside a GGUF file; none for anything else."""
    if not is_gguf_path(path):
        return {}
    return tokenizer_of(open_gguf(path))[0]
