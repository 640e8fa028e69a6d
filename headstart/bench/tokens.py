"""Counting tokens as a model does, without loading the model."""

from __future__ import annotations

from pathlib import Path

from headstart.bench.workload import CountTokens
from headstart.errors import DataError


def token_counter(folder: str | Path) -> CountTokens | None:
    """Of the folder's tokenizer.json, special tokens left out; None where there is none."""
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

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count_tokens
