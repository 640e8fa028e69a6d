"""Tokens as a model has them, without loading the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.errors import DataError, tokenizer_faults


@dataclass(frozen=True)
class Tokens:
    """A tokenizer, of a folder or behind a server; special tokens are left out."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str | None]  # None: there is no such token

    def count(self, text: str) -> int:
        return len(self.encode(text))


def folder_tokens(folder: str | Path) -> Tokens | None:
    """Of the folder's tokenizer.json; None where there is none."""
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    with tokenizer_faults(folder, DataError):  # what it raises is not specified
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
