"""Requests and answers of another server, in OpenAI's batch format, as texts to learn from.

A line of requests has `custom_id` and `body` with `messages`; a line of answers has the same
`custom_id` and `response.body` with `choices`. Token ids are made with the model's own tokenizer,
so an answer counts as text: nothing is known of the noise that chose it. Where the text is not what
the model wrote, the answer is left out: of a tool call or a separated reasoning there are only
parts, and how they were spelled is lost.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.data.prompt_reader import PromptReader
from headstart.documents import parse_json
from headstart.errors import DataError, RequestError
from headstart.files import plain_lines, why_unreadable
from headstart.learn.kinds import Kinds
from headstart.learn.texts import Text

PromptOf = Callable[[dict[str, Any]], list[int]]  # of a request's body; RequestError: refused
_CALLS, _REASONING = "answers with tool calls", "answers without their reasoning"
_EMPTY, _EQUAL, _REFUSED = "empty answers", "answers like earlier ones", "refused requests"
_UNANSWERED = "requests without an answer"


@dataclass
class Logged:
    """What two files of a batch hold."""

    texts: list[Text] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)  # by what they are
    names: set[str] = field(default_factory=set)

    def describe(self) -> str:
        """In one line."""
        left_out = ", ".join(f"{count} {what}" for what, count in sorted(self.left_out.items()))
        return f"read {len(self.texts)} answers; left out {left_out or 'nothing'}"


def read_batches(
    requests: Path, answers: Path, reader: PromptReader, prompt_of: PromptOf
) -> Logged:
    """Texts, one for each choice; DataError where there is none."""
    asked = {line["custom_id"]: line["body"] for line in _lines(requests, "body")}
    kinds, logged, answered = Kinds(), Logged(), set[str]()
    for line in _lines(answers, "response"):
        name, response = line["custom_id"], line["response"].get("body")
        choices = response.get("choices") if isinstance(response, dict) else None
        if name in asked and isinstance(choices, list) and choices:
            answered.add(name)
            _read_answers(logged, asked[name], response, reader, prompt_of, kinds)
    if unanswered := len(asked.keys() - answered):
        logged.left_out[_UNANSWERED] = unanswered
    if not logged.texts:
        raise DataError(
            f"{answers} answers no request of {requests} so that it can be learned from "
            f"({logged.describe()}): expected lines of OpenAI's batch format with the same "
            "custom_id, and chat completions with messages."
        )
    return logged


def _read_answers(
    logged: Logged, body: dict[str, Any], response: dict[str, Any], reader: PromptReader,
    prompt_of: PromptOf, kinds: Kinds,
) -> None:  # fmt: skip
    """All choices of one request."""
    try:
        prompt = prompt_of(body)
    except RequestError:
        logged.left_out[_REFUSED] += 1
        return
    kind, created = kinds.kind_of(body.get("messages")), response.get("created")
    for choice in response["choices"]:
        why = _why_not(choice)
        if why is not None:
            logged.left_out[why] += 1
            continue
        ids = reader.encode(choice["message"]["content"], add_special_tokens=False)
        end = getattr(reader.tokenizer, "eos_token_id", None)
        if end is not None and _ended_itself(body, choice):
            ids = [*ids, int(end)]
        name = f"log-{hashlib.sha256(repr((prompt, ids)).encode()).hexdigest()[:32]}"
        if name in logged.names:
            logged.left_out[_EQUAL] += 1
            continue
        logged.names.add(name)
        logged.texts.append(Text(
            id=name, prompt=prompt, answer=ids, kind=kind,
            time=float(created) if isinstance(created, int | float) else time.time(),
            finish_reason=str(choice.get("finish_reason")),
        ))  # fmt: skip


def _why_not(choice: Any) -> str | None:
    """Why the content is not all that the model wrote; None where it is."""
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        return _EMPTY
    if message.get("tool_calls") or message.get("function_call"):
        return _CALLS
    if message.get("reasoning_content") or message.get("reasoning"):
        return _REASONING
    content = message.get("content")
    return None if isinstance(content, str) and content else _EMPTY


def _ended_itself(body: dict[str, Any], choice: dict[str, Any]) -> bool:
    """Whether the model wrote its end token: a text that was to stop it may have cut it off."""
    if choice.get("finish_reason") != "stop" or choice.get("stop_reason") is not None:
        return False
    return "stop_reason" in choice or not body.get("stop")


def _lines(path: Path, needed: str) -> Iterator[dict[str, Any]]:
    number = 0
    try:
        for line in plain_lines(path):
            number += 1
            if line.strip():
                found = parse_json(line)
                if not isinstance(found, dict) or not isinstance(found.get("custom_id"), str):
                    raise ValueError("it has no custom_id")
                if isinstance(found.get(needed), dict):
                    yield found
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({why_unreadable(error)}). Give a file in OpenAI's "
            "batch format."
        ) from None
    except ValueError as error:
        raise DataError(
            f"{path}, line {number}: {error}; expected a line of OpenAI's batch format."
        ) from None
