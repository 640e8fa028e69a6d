"""Logs of other servers in OpenAI's batch format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headstart.errors import DataError, RequestError
from headstart.learn.batch_logs import read_batches


class Reader:
    """A tokenizer of one token a character."""

    class tokenizer:
        eos_token_id = 0

    def read(self, messages: list[dict[str, str]]) -> list[int]:
        if messages[0]["content"] == "refused":
            raise RequestError("no")
        return [1, *map(ord, messages[0]["content"])]

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(char) for char in text]


def lines(path: Path, documents: list[Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in documents))
    return path


def asked(name: str, text: str) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": text}]}}  # fmt: skip


def said(name: str, text: str | None, reason: str = "stop") -> dict[str, Any]:
    choices = [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]
    return {"custom_id": name, "response": {"status_code": 200,
            "body": {"created": 1700000000, "choices": choices}}}  # fmt: skip


def test_requests_and_answers_are_joined_by_their_ids(tmp_path: Path) -> None:
    requests = lines(tmp_path / "r", [asked("a", "hi"), asked("b", "ho"), asked("c", "refused")])
    answers = lines(tmp_path / "a", [
        said("b", "yes", "length"), said("a", "no"), said("c", "x"), said("z", "x"),
        {"custom_id": "d", "error": {"code": "x"}, "response": None},
    ])  # fmt: skip
    texts, left_out = read_batches(requests, answers, Reader())
    assert left_out == 1
    assert [(t.prompt, t.answer) for t in texts] == [
        ([1, *b"ho"], [*b"yes"]), ([1, *b"hi"], [*b"no", 0]),
    ]  # fmt: skip
    assert texts[0].time == 1700000000 and not texts[0].record().is_replayable


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    good = lines(tmp_path / "g", [asked("a", "hi")])
    with pytest.raises(DataError, match="answers no request"):
        read_batches(good, lines(tmp_path / "n", [said("q", "x")]), Reader())
    (tmp_path / "bad").write_text('{"custom_id": "a"}\nnot json\n')
    with pytest.raises(DataError, match="line 2"):
        read_batches(tmp_path / "bad", good, Reader())
    with pytest.raises(DataError, match="cannot be read"):
        read_batches(tmp_path / "none", good, Reader())
