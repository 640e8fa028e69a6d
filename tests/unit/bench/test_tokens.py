"""Tokens are counted by the model's own tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from headstart.bench.tokens import folder_tokens
from headstart.errors import DataError


def test_a_folders_tokenizer_counts(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = folder_tokens(tmp_path)
    assert tokens is not None and tokens.count("a a b") == 3


def test_no_tokenizer_is_none_and_a_broken_one_an_error(tmp_path: Path) -> None:
    assert folder_tokens(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"the tokenizer of .* fails"):
        folder_tokens(tmp_path)
