"""Prompt files of every form, and what broken ones are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headstart.data.conversations import read_conversations
from headstart.errors import DataError


def written(folder: Path, *lines: Any, name: str = "asked.jsonl") -> Path:
    path = folder / name
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("entry", "roles"),
    [
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]},
         ["system", "user"]),
        ({"turns": ["q", "and?"]}, ["user", "user"]),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
         ["user", "assistant"]),
        ({"prompt": "q"}, ["user"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]}, ["user"]),
    ],
    ids=["messages", "mt-bench", "sharegpt", "prompt", "text parts"],
)  # fmt: skip
def test_every_form_becomes_messages(entry: Any, roles: list[str], tmp_path: Path) -> None:
    (read,) = read_conversations(written(tmp_path, entry))
    assert [message["role"] for message in read.messages] == roles
    assert "q" in [message["content"] for message in read.messages]


def test_a_question_id_and_a_category_are_kept(tmp_path: Path) -> None:
    (read,) = read_conversations(
        written(tmp_path, {"question_id": 81, "category": "writing", "turns": ["a", "b"]})
    )
    assert (read.id, read.category, read.num_turns) == ("81", "writing", 2)


def test_ids_default_to_the_place_in_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "a"}, "", {"prompt": "b", "source": "books"})
    first, second = read_conversations(path)
    assert (first.id, second.id) == ("asked-1", "asked-3")
    assert (first.category, second.category) == ("general", "books")


def test_an_array_is_read_like_lines(tmp_path: Path) -> None:
    entries = [{"prompt": "a"}, {"prompt": "b", "id": 7}]
    path = tmp_path / "asked.json"
    path.write_text(json.dumps(entries, indent=1))
    assert [c.id for c in read_conversations(path)] == ["asked-1", "7"]


def test_separators_inside_a_text_do_not_cut_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "a\u2028b\u0085c"}')
    (read,) = read_conversations(path)
    assert read.messages[0]["content"] == "a\u2028b\u0085c"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{oops", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ({"text": "q"}, "has none of"),
        ({"prompt": "q", "turns": ["q"]}, "has turns and prompt of"),
        ({"messages": []}, "messages is not a list with something in it"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role is 'tool'"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "has tool_calls"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no message of a user"),
        ({"messages": [{"role": "user", "content": None}]}, "a message has no text"),
        ({"prompt": "  "}, "a message has no text"),
        ('{"prompt": "\\ud800"}', "a message has half of a surrogate pair"),
        ('{"prompt": "x", "id": "a\\udc00"}', "id has half of a surrogate pair"),
        ('{"prompt": "x", "category": "\\ud800"}', "category has half of a surrogate pair"),
        ({"conversations": [{"from": "dog", "value": "x"}]}, "from is 'dog'"),
        ({"prompt": "q", "id": ["a"]}, "id is ['a']"),
        ({"prompt": "q", "category": 3}, "category is 3"),
        ({"prompt": "q", "id": "same"}, "id 'same' is that of line 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_line_is_named(line: Any, found: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "fine", "id": "same"}, line)
    with pytest.raises(DataError) as caught:
        read_conversations(path)
    assert found in str(caught.value)
    assert "has 1 broken lines: line 2:" in str(caught.value)


def test_many_broken_lines_are_counted_and_three_are_shown(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 5 broken lines: line 1: .* and 2 more"):
        read_conversations(written(tmp_path, *["x"] * 5))


@pytest.mark.parametrize(
    ("data", "found"),
    [(b"\n\n", "holds no prompts"), (b"\xff\xfe", "not UTF-8"), (b"[{", "begins as a JSON array")],
    ids=["empty", "binary", "half an array"],
)
def test_a_file_without_prompts_is_refused(data: bytes, found: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(data)
    with pytest.raises(DataError, match=found):
        read_conversations(tmp_path / "x.jsonl")


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_conversations(tmp_path / "nothing.jsonl")
