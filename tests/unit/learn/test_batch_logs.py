"""Logs of other servers in OpenAI's batch format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headstart.errors import DataError, RequestError
from headstart.learn.batch_logs import Logged, read_batches


class Reader:
    """A tokenizer of one token a character."""

    class tokenizer:
        eos_token_id = 0

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(char) for char in text]


def prompt_of(body: dict[str, Any]) -> list[int]:
    text = body["messages"][0]["content"]
    if text == "refused":
        raise RequestError("no")
    return [1, *map(ord, text)]


def read(requests: Path, answers: Path) -> Logged:
    reader: Any = Reader()
    return read_batches(requests, answers, reader, prompt_of)


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
    logged = read(requests, answers)
    texts = logged.texts
    assert logged.describe() == "read 2 answers; left out 1 refused requests"
    assert [(t.prompt, t.answer) for t in texts] == [
        ([1, *b"ho"], [*b"yes"]), ([1, *b"hi"], [*b"no", 0]),
    ]  # fmt: skip
    assert texts[0].time == 1700000000 and not texts[0].record().is_replayable


def answered(*choices: Any) -> dict[str, Any]:
    return {"custom_id": "a", "response": {"body": {"choices": list(choices)}}}


def choice(**changes: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "no", **changes.pop("message", {})}
    return {"message": message, "finish_reason": "stop", **changes}


def test_answers_whose_tokens_cannot_be_remade_are_left_out_and_counted(tmp_path: Path) -> None:
    """Regression: they were learned from as if their content were all that the model wrote."""
    requests = lines(tmp_path / "r", [asked(name, "hi") for name in "abcd"])
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answers = lines(tmp_path / "a", [
        answered(
            choice(), choice(message={"tool_calls": [call]}),
            choice(message={"content": None, "function_call": call["function"]}),
            choice(message={"reasoning_content": "hm"}), choice(message={"reasoning": "hm"}),
            choice(message={"content": ""}), choice(message={"content": "ho", "tool_calls": []}),
            {"finish_reason": "stop"}, "nothing",
        ),
        said("b", "yes"), {"custom_id": "c", "response": {"status_code": 500, "body": None}},
    ])  # fmt: skip
    logged = read(requests, answers)
    assert [text.answer for text in logged.texts] == [[*b"no", 0], [*b"ho", 0], [*b"yes", 0]]
    assert logged.describe() == (
        "read 3 answers; left out 2 answers with tool calls, 2 answers without their reasoning, "
        "3 empty answers, 2 requests without an answer"
    )


@pytest.mark.parametrize(
    ("stop", "facts", "has_end"),
    [(None, {}, True), (["."], {}, False), (["."], {"stop_reason": None}, True),
     (["."], {"stop_reason": "."}, False), (None, {"stop_reason": 7}, False),
     (None, {"finish_reason": "length"}, False)],
)  # fmt: skip
def test_an_answer_has_its_end_token_where_the_model_wrote_it(
    stop: Any, facts: dict[str, Any], has_end: bool, tmp_path: Path
) -> None:
    request = asked("a", "hi")
    request["body"]["stop"] = stop
    files = lines(tmp_path / "r", [request]), lines(tmp_path / "a", [answered(choice(**facts))])
    (text,) = read(*files).texts
    assert text.answer == [*b"no", *([0] if has_end else [])]


def test_nothing_to_learn_from_is_said_with_what_was_left_out(tmp_path: Path) -> None:
    requests = lines(tmp_path / "r", [asked("a", "hi")])
    answers = lines(tmp_path / "a", [answered(choice(message={"reasoning": "hm"}))])
    with pytest.raises(DataError, match="left out 1 answers without their reasoning"):
        read(requests, answers)


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    good = lines(tmp_path / "g", [asked("a", "hi")])
    with pytest.raises(DataError, match="answers no request"):
        read(good, lines(tmp_path / "n", [said("q", "x")]))
    (tmp_path / "bad").write_text('{"custom_id": "a"}\nnot json\n')
    with pytest.raises(DataError, match="line 2"):
        read(tmp_path / "bad", good)
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "none", good)
