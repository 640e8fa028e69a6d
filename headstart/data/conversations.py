"""The one reader for files of prompts and conversations.

A line (or an element of a JSON array) is one of
    {"messages": [{"role": "user", "content": "..."}, ...]}
    {"question_id": 81, "category": "writing", "turns": ["...", "..."]}        MT-Bench
    {"conversations": [{"from": "human", "value": "..."}, ...]}                ShareGPT
    {"prompt": "..."}
with optional `id`, `category` and `source`. A file is taken whole or refused: a line that cannot be
read is an error that names it, since prompts lost in silence would only show in the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.documents import parse_json
from headstart.errors import DataError, some
from headstart.files import plain_lines, read_plain

ROLES = ("system", "developer", "user", "assistant")
_SHAREGPT = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "bing": "assistant", "bard": "assistant", "system": "system",
}  # fmt: skip
_MOST_ARRAY_BYTES = 1 << 30  # files of lines may be of any size
_FORMS = "messages, turns, conversations or prompt"

Message = Mapping[str, str]


@dataclass(frozen=True)
class Conversation:
    """Messages with role and content; MT-Bench turns are user messages without answers between."""

    id: str
    category: str
    messages: tuple[Message, ...]

    @property
    def num_turns(self) -> int:
        """How many answers it asks for: one after each user message."""
        return sum(message["role"] == "user" for message in self.messages)

    def next_messages(self, answers: Sequence[str]) -> list[Message]:
        """Everything up to the message to be answered next, with a model's own answers so far.

        Answers that the conversation came with are left out: they are not the model's.
        """
        result: list[Message] = []
        given = iter(answers)
        for message in self.messages:
            if message["role"] == "assistant":
                continue
            result.append(message)
            if message["role"] == "user":
                answer = next(given, None)
                if answer is None:
                    break
                result.append({"role": "assistant", "content": answer})
        return result


def read_conversations(path: str | Path) -> list[Conversation]:
    """Every conversation of a file, in order; DataError names the lines that are wrong."""
    file = Path(path)
    found: list[Conversation] = []
    wrong: list[str] = []
    lines_of: dict[str, int] = {}
    for number, entry in _entries(file):
        try:
            conversation = _conversation(entry, f"{file.stem}-{number}")
        except _Wrong as error:
            wrong.append(f"line {number}: {error}")
            continue
        first = lines_of.setdefault(conversation.id, number)
        if first != number:
            wrong.append(f"line {number}: id {conversation.id!r} is that of line {first}")
            continue
        found.append(conversation)
    if wrong:
        raise DataError(
            f"{file} has {len(wrong)} broken lines: {some(wrong)}. Expected objects with {_FORMS}; "
            "mend or remove those lines."
        )
    if not found:
        raise DataError(f"{file} holds no prompts; expected one JSON object a line with {_FORMS}.")
    return found


class _Wrong(Exception):
    """What is the matter with one line."""


def _entries(file: Path) -> Iterator[tuple[int, Any]]:
    """Line numbers from 1 (of an array: places) and what stands there; text that is not JSON stays
    text, which is no conversation either."""
    is_first = True
    try:
        for number, data in enumerate(plain_lines(file), 1):
            line = data.decode("utf-8-sig" if number == 1 else "utf-8")
            if is_first and line.lstrip().startswith("["):
                yield from enumerate(_array(file), 1)
                return
            if line.strip():
                is_first = False
                try:
                    yield number, parse_json(line)
                except ValueError:
                    yield number, line
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}). Check the path.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error.reason}). Convert it first.") from error


def _array(file: Path) -> Any:
    try:
        return parse_json(read_plain(file, _MOST_ARRAY_BYTES).decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise DataError(
            f"{file} begins as a JSON array and is not one ({error}). Mend it, or write one JSON "
            "object a line."
        ) from error


def _conversation(entry: Any, default_id: str) -> Conversation:
    if isinstance(entry, str):
        raise _Wrong("not JSON")
    if not isinstance(entry, dict):
        raise _Wrong("not a JSON object")
    forms = [name for name in ("messages", "turns", "conversations", "prompt") if name in entry]
    if len(forms) != 1:
        raise _Wrong(f"has {' and '.join(forms) or 'none'} of {_FORMS}; expected one")
    messages = tuple(_READERS[forms[0]](entry[forms[0]]))
    if not any(message["role"] == "user" for message in messages):
        raise _Wrong("no message of a user")
    given = entry.get("id", entry.get("question_id", default_id))
    if not isinstance(given, str | int) or isinstance(given, bool) or given == "":
        raise _Wrong(f"id is {given!r}; expected text or a number")
    category = entry.get("category") or entry.get("source") or "general"
    if not isinstance(category, str):
        raise _Wrong(f"category is {category!r}; expected text")
    return Conversation(_whole(str(given), "id"), _whole(category, "category"), messages)


def _from_messages(value: Any) -> Iterator[Message]:
    for message in _list(value, "messages"):
        if not isinstance(message, dict):
            raise _Wrong("a message is not an object")
        role = message.get("role")
        if role not in ROLES:
            raise _Wrong(f"role is {role!r}; expected {', '.join(ROLES)}")
        unknown = sorted(set(message) - {"role", "content", "name"})
        if unknown:
            raise _Wrong(f"a message has {some(unknown)}, which is not supported")
        yield {"role": role, "content": _content(message.get("content"))}


def _from_turns(value: Any) -> Iterator[Message]:
    for turn in _list(value, "turns"):
        yield {"role": "user", "content": _content(turn)}


def _from_sharegpt(value: Any) -> Iterator[Message]:
    for message in _list(value, "conversations"):
        if not isinstance(message, dict):
            raise _Wrong("a message is not an object")
        sender = message.get("from")
        if sender not in _SHAREGPT:
            raise _Wrong(f"from is {sender!r}; expected {', '.join(_SHAREGPT)}")
        yield {"role": _SHAREGPT[sender], "content": _content(message.get("value"))}


def _from_prompt(value: Any) -> Iterator[Message]:
    yield {"role": "user", "content": _content(value)}


_READERS = {
    "messages": _from_messages,
    "turns": _from_turns,
    "conversations": _from_sharegpt,
    "prompt": _from_prompt,
}


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _Wrong(f"{name} is not a list with something in it")
    return value


def _content(value: Any) -> str:
    """Text, or the text parts that chat APIs send as a list."""
    if isinstance(value, list) and all(_is_text_part(part) for part in value):
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str) or not value.strip():
        raise _Wrong("a message has no text")
    return _whole(value, "a message")


def _whole(text: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _Wrong(f"{what} has half of a surrogate pair in it") from None
    return text


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )
