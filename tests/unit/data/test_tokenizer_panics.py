"""A tokenizer.json that loads and makes the library panic: one line, and one request's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.odd_files import PANICS
from support.server_runs import write_tokenizer

from headstart.bench.tokens import folder_tokens
from headstart.calibrate.given_tokenizer import read_tokenizer
from headstart.data.detokenizer import Detokenizer
from headstart.data.prompt_reader import PromptReader
from headstart.engine.output import emit, update_since
from headstart.engine.request import Request
from headstart.engine.verifier import Verdict
from headstart.errors import BadConfig, BrokenFile, DataError, RequestError, tokenizer_faults
from headstart.sampling.params import SamplingParams
from headstart.server.pieces import Pieces


def folder_with(folder: Path, part: str) -> Path:
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), part: PANICS[part]}))
    return folder


def reader(folder: Path) -> PromptReader:
    """A reader of prompts, with as much of a checkpoint as it needs."""
    checkpoint: Any = SimpleNamespace(
        folder=folder,
        config=SimpleNamespace(fields={}),
        generation_config={},
        tokenizer_documents=dict,
    )
    return PromptReader(checkpoint)


PanicException = type("PanicException", (BaseException,), {})


class Panicking:
    """Token i is the character i; one makes it panic."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        if ord("!") in tokens:
            raise PanicException("index out of bounds")
        return "".join(map(chr, tokens))


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer", "post_processor"])
def test_encoding_is_refused_in_one_line(tmp_path: Path, part: str) -> None:
    with pytest.raises(RequestError, match=r"the tokenizer of .* fails \(.+\)\. Download") as found:
        reader(folder_with(tmp_path, part)).encode("a b")
    assert "\n" not in str(found.value)
    assert str(tmp_path) not in str(found.value), "clients of a server are told no path"


def test_decoding_is_refused_in_one_line(tmp_path: Path) -> None:
    own = reader(folder_with(tmp_path, "decoder"))
    with pytest.raises(RequestError, match=r"the tokenizer of .* fails"):
        own.decode([10, 11])
    with pytest.raises(BrokenFile, match=r"the tokenizer of .* fails"):
        assert read_tokenizer(tmp_path).left_out
    tokens = folder_tokens(tmp_path)
    assert tokens is not None
    with pytest.raises(DataError, match=r"the tokenizer of .* fails"):
        tokens.decode([10, 11])
    assert Pieces(own.tokenizer).bytes_of(10) == own.tokenizer.convert_ids_to_tokens(10).encode()


def test_a_panic_while_decoding_ends_its_own_request() -> None:
    own = Request("g/0", [1], SamplingParams(), 0, 50, frozenset({0}), 0, group="g")
    own.text = Detokenizer(Panicking(), (), skip_special=True, keep_stop=False)
    tokens = list(map(ord, "ab!cd"))
    emit(own, Verdict(tokens, ["bonus"] * 5, 0, 0, []))
    update = update_since(own, 0)
    assert (update.text, update.finish_reason) == ("ab", "error")
    assert update.error is not None
    assert "index out of bounds" in update.error
    assert len(update.token_ids) == 3


def test_nothing_is_decoded_after_a_panic() -> None:
    text = Detokenizer(Panicking(), ("d",), skip_special=True, keep_stop=False)
    assert [text.add(ord(character)) for character in "ab!cd"] == [None] * 5
    text.finish()
    assert (text.text, text.take(is_last=True)) == ("ab", "ab")


def test_an_interrupt_is_no_fault_of_a_tokenizer() -> None:
    with pytest.raises(KeyboardInterrupt), tokenizer_faults("m"):
        raise KeyboardInterrupt
    with pytest.raises(BadConfig, match="the tokenizer of m fails"), tokenizer_faults("m"):
        raise PanicException
