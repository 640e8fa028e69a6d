"""Checkpoints whose tokenizer is unusual: special tokens that no list names, or no tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from support.server_runs import ALPHABET, HTTP, SPECIAL, served, write_tokenizer
from support.server_threads import Running, serving, small_engine
from support.tiny_fixture import Tiny

HELLO = [{"role": "user", "content": "hi"}]
MARKED = [*SPECIAL[:4], "[THINK]", "[/THINK]"]  # tokenizer.json alone says that they are special
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}[THINK]{# [/THINK] #}"
LETTER_A, END_OF_THINKING = len(MARKED) + ALPHABET.index("a"), MARKED.index("[/THINK]")


@pytest.fixture(scope="module")
def marked(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("marked") / "model"
    shutil.copytree(served(tiny), folder)
    write_tokenizer(folder, TEMPLATE, MARKED)
    with serving(small_engine(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def bare(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(served(tiny), folder, ignore=shutil.ignore_patterns("tokenizer*"))
    with serving(small_engine(folder)) as server:
        yield server


def asked(server: Running, route: str, **fields: Any) -> Any:
    return HTTP.post(f"{server.url}{route}", json={"max_tokens": 12, "seed": 1, **fields})


def test_marks_that_only_the_tokenizers_file_calls_special_end_the_thinking(
    marked: Running,
) -> None:
    """Regression: they were left out of the text, so that all of it was thinking."""
    own = {"allowed_token_ids": [LETTER_A, END_OF_THINKING], "temperature": 5}
    answer = asked(marked, "/v1/chat/completions", messages=HELLO, return_token_ids=True, **own)
    (choice,) = answer.json()["choices"]
    before = choice["token_ids"].index(END_OF_THINKING)
    assert 0 < before < 11
    assert choice["message"]["reasoning_content"] == "a" * before
    rest = ["a" if token == LETTER_A else "[/THINK]" for token in choice["token_ids"][before + 1 :]]
    assert choice["message"]["content"] == "".join(rest)


def test_offsets_leave_out_what_the_text_leaves_out(marked: Running) -> None:
    """Regression: offsets counted the marks, which were not in the text."""
    own = {"allowed_token_ids": [LETTER_A, END_OF_THINKING], "temperature": 5}
    answer = asked(marked, "/v1/completions", prompt="x", logprobs=0, **own)
    (choice,) = answer.json()["choices"]
    tokens = choice["logprobs"]["tokens"]
    assert set(tokens) == {"a", "[/THINK]"} and set(choice["text"]) == {"a"}
    offsets = [tokens[:number].count("a") for number in range(len(tokens))]
    assert choice["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, "messages"),
        ("/v1/completions", {"prompt": "hi"}, "prompt"),
    ],
)
def test_text_for_a_model_without_a_tokenizer_is_refused(
    bare: Running, route: str, fields: dict[str, Any], param: str
) -> None:
    """Regression: a chat ended with a 500."""
    answer = asked(bare, route, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert "has no tokenizer; give token ids" in error["message"]
    assert asked(bare, "/v1/completions", prompt=[1, 2, 3]).status_code == 200
