"""Tokens as a model has them, without loading the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.errors import DataError


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

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # what it raises is not specified
        raise DataError(
            f"{file} is not a tokenizer ({error}). Give a folder with the model's own."
        ) from error

    def encode(text: str) -> Sequence[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(ids: Sequence[int]) -> str | None:
        if max(ids) >= tokenizer.get_vocab_size():
            return None
        return str(tokenizer.decode(list(ids)))

    return Tokens(encode, decode)
