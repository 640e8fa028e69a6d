"""Requests and answers of another server, in OpenAI's batch format, as texts to learn from.

A line of requests has `custom_id` and `body` with `messages`; a line of answers has the same
`custom_id` and `response.body` with `choices`. Token ids are made with the model's own tokenizer,
so an answer counts as text: nothing is known of the noise that chose it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headstart.data.prompt_reader import PromptReader
from headstart.documents import parse_json
from headstart.errors import DataError, RequestError
from headstart.files import plain_lines
from headstart.learn.kinds import Kinds
from headstart.learn.texts import Text


def read_batches(requests: Path, answers: Path, reader: PromptReader) -> tuple[list[Text], int]:
    """Texts, and how many requests were left out: no answer, an error, or a refused prompt."""
    asked = {line["custom_id"]: line for line in _lines(requests, "body")}
    kinds, texts, found = Kinds(), [], 0
    for line in _lines(answers, "response"):
        request = asked.get(line["custom_id"])
        if request is None:
            continue
        found += 1
        text = _text(request["body"], line["response"], reader, kinds)
        if text is not None:
            texts.append(text)
    if not texts:
        raise DataError(
            f"{answers} answers no request of {requests}: expected lines of OpenAI's batch format "
            "with the same custom_id, and chat completions with messages."
        )
    return texts, len(asked) - len(texts)


def _text(
    body: dict[str, Any], response: dict[str, Any], reader: PromptReader, kinds: Kinds
) -> Text | None:
    answer = response.get("body") if isinstance(response, dict) else None
    choices = answer.get("choices") if isinstance(answer, dict) else None
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(messages, list):
        return None
    choice = choices[0]
    content = (choice.get("message") or {}).get("content")
    if not isinstance(content, str) or not content:
        return None
    try:
        prompt = reader.read(messages)
    except RequestError:
        return None
    ids = reader.encode(content, add_special_tokens=False)
    end = getattr(reader.tokenizer, "eos_token_id", None)
    reason = str(choice.get("finish_reason"))
    if reason == "stop" and end is not None:
        ids = [*ids, int(end)]
    sha = hashlib.sha256(repr((prompt, ids)).encode()).hexdigest()[:32]
    created = answer.get("created") if isinstance(answer, dict) else None
    return Text(
        id=f"log-{sha}", prompt=prompt, answer=ids, kind=kinds.kind_of(messages),
        time=float(created) if isinstance(created, int | float) else time.time(),
        finish_reason=reason,
    )  # fmt: skip


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
        raise DataError(f"{path} cannot be read ({error.strerror or error}).") from None
    except ValueError as error:
        raise DataError(
            f"{path}, line {number}: {error}; expected a line of OpenAI's batch format."
        ) from None
